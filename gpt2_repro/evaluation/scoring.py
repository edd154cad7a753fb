"""Score all models on all tasks, and cache the scores."""

import dataclasses
import hashlib
import json
import logging
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from gpt2_repro import tokenization
from gpt2_repro.errors import RunFailed
from gpt2_repro.evaluation.harness import evaluate_launched, evaluate_model, fetch_data
from gpt2_repro.evaluation.models import LoadedModel
from gpt2_repro.evaluation.output import file_name
from gpt2_repro.evaluation.scores import EvaluationSettings, ScoredModel, TaskScores, read_scores
from gpt2_repro.evaluation.tasks import LOCAL_TASKS, write_task_files
from gpt2_repro.files import read_object, to_json, write_whole
from gpt2_repro.typed_json import from_json


logger = logging.getLogger(__name__)

CACHE = Path(".cache/evaluation")
READING = 2  # increase it if the same model gets other scores from the same samples or texts
# The harness's results of a task, and the scores that were read from the results and samples.
Results = tuple[dict[str, Any], list[TaskScores]]


def score_models(
    models: Sequence[LoadedModel],
    tasks: list[str],
    local: Mapping[str, Path],
    settings: EvaluationSettings,
    output: Path,
    *,
    cached: bool,
) -> list[ScoredModel]:
    """Score all models on all tasks, and write lm-eval's results to `output`.

    If `cached` is true, scores in .cache/evaluation are reused, and new scores are added there.

    Args:
        local: the local data file of each task that does not read from the Hub.
    """
    scored = []
    # Task files are temporary, so that several evaluations can run at the same time.
    with tempfile.TemporaryDirectory(prefix="evaluation-") as scratch:
        task_folder = Path(scratch, "tasks")
        definitions = write_task_files(local, task_folder, tasks)
        for model in models:
            scores: list[TaskScores] = []
            loaded: tuple[Any, Any] | None = None
            for task in tasks:
                key = _cache_key(settings, model.column.revision, task, definitions.get(task, "stock"))
                found = _read_cache(key) if cached else None
                what = "reusing the cached scores of" if found else f"scoring on {settings.device}:"
                logger.info("%s: %s model %r", task, what, model.name)
                if found is None:
                    loaded = loaded or model.load()
                    model_folder = Path(scratch, str(model.column.revision))
                    try:
                        found = _evaluate(*loaded, task, settings, task_folder, model_folder)
                    except OverflowError:
                        why = f"The perplexity of {model.name} on {task} is too large to compute: the model has diverged."
                        raise RunFailed(f"{why} Score the other models without it.") from None
                    if cached:
                        stored = {"results": found[0], "scores": [dataclasses.asdict(its) for its in found[1]]}
                        _write(_cache_file(key), json.dumps({"key": key, **stored}))
                results, of_task = found
                _write(output / file_name(model.name) / f"{task}.json", to_json(results, indent=2) + "\n")
                # The harness reads a copy of the local file. The comparison names the original file.
                source = str(local[task]) if task in local else None
                scores += [dataclasses.replace(its, data=source or its.data) for its in of_task]
            scored.append((model.column, scores))
    return scored


def _write(path: Path, text: str) -> None:
    """Write a file. If this fails, log a warning, because the scores took hours."""
    try:
        write_whole(path, text)
    except OSError as error:
        logger.warning("Could not write %s (%s).", path, error.strerror)


def check_offline_data(tasks: Sequence[str]) -> None:
    """Raise UserError if, in offline mode, a task's data is not in the local cache.

    Tasks with scores in .cache/evaluation are not checked. Tasks that are not in LOCAL_TASKS are not checked either,
    because lm-eval needs ten seconds to find them.
    """
    from huggingface_hub import constants

    scored = {path.name.rpartition("-")[0] for path in CACHE.glob("*.json")}
    tasks = [task for task in tasks if task in LOCAL_TASKS and task not in scored]
    if not constants.HF_HUB_OFFLINE or not tasks:
        return
    with tempfile.TemporaryDirectory(prefix="evaluation-") as scratch:
        write_task_files({}, Path(scratch), tasks)
        for task in tasks:
            fetch_data(task, Path(scratch))


def _evaluate(
    model: Any, tokenizer: Any, task: str, settings: EvaluationSettings, task_folder: Path, model_folder: Path
) -> Results:
    num_processes = count_processes(settings)
    if num_processes > 1:
        fetch_data(task, task_folder)
        if not model_folder.exists():
            model.save_pretrained(model_folder)
            tokenization.save(tokenizer, model_folder)
        found = evaluate_launched(model_folder, task, settings, task_folder, num_processes=num_processes)
    else:
        found = evaluate_model(model, tokenizer, task, settings, task_folder)
    return found[0], read_scores(*found, tokenizer)


def count_processes(settings: EvaluationSettings) -> int:
    """Return the number of processes to use: one per GPU for "cuda", otherwise one."""
    import torch

    found = torch.cuda.device_count() if settings.device == "cuda" else 1
    return min(found, settings.limit or found)  # the harness needs at least one document per process


def _cache_key(settings: EvaluationSettings, revision: str | None, task: str, definition: str) -> dict[str, Any]:
    """Return the cache key of a task's scores: everything that the scores depend on."""
    of_model = {"model": revision, "task": task, "definition": definition}
    return dataclasses.asdict(settings) | {"harness": version("lm_eval"), "reading": READING} | of_model


def _cache_file(key: dict[str, Any]) -> Path:
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:20]
    return CACHE / f"{key['task']}-{digest}.json"


def _read_cache(key: dict[str, Any]) -> Results | None:
    stored = read_object(_cache_file(key))
    if stored.get("key") != key:  # missing or damaged
        return None
    return stored["results"], from_json(list[TaskScores], stored["scores"])
