"""Score models on tasks with lm-evaluation-harness, on one device or all GPUs."""

import contextlib
import dataclasses
import datetime
import functools
import hashlib
import json
import logging
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from gpt2_repro import hardware, tokenization
from gpt2_repro.data.prepared import PreparedData
from gpt2_repro.errors import RunFailed, UserError, in_a_line
from gpt2_repro.evaluation import core
from gpt2_repro.evaluation.comparison import EvaluationSettings
from gpt2_repro.evaluation.models import LoadedModel
from gpt2_repro.evaluation.output import file_name
from gpt2_repro.evaluation.overlap import find_overlaps
from gpt2_repro.evaluation.scores import COMPLETION, Job, Metric, ScoredModel, completion_scores, read_scores
from gpt2_repro.evaluation.tasks import OWN_STANDARD_ERRORS, local_task, task_index, write_task_files
from gpt2_repro.files import from_json, read_object, to_json, write_whole
from gpt2_repro.hardware import check_hub
from gpt2_repro.launchers import LAUNCHERS, ROOT
from gpt2_repro.manifest import OVERLAP
from gpt2_repro.tokenization import encode, load


logger = logging.getLogger(__name__)

SEEDS = ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed")
CACHE = Path(".cache/evaluation")
READING = 4  # increase it if the same model gets other scores from the same samples or texts
# The harness's results of a task, and the scores that were read from the results and samples.
Results = tuple[dict[str, Any], list[Metric]]


def choose_device(name: str | None) -> str:
    """Return `name` if this device works, or "cuda" or "cpu" if `name` is None."""
    import torch

    if name is None:
        on_cpu = hardware.choose_device(use_cpu=False, accept_any_hardware=True, cpu_option="--device cpu")
        return "cpu" if on_cpu else "cuda"
    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0][:100]
        raise UserError(f"--device {name} does not work here ({reason}). Pass cpu, cuda or cuda:N.") from None
    return name


@contextlib.contextmanager
def task_files(
    tasks: Mapping[str, Path | None], bundle: Sequence[core.CoreTask]
) -> Iterator[tuple[Path, dict[str, str]]]:
    """Write the task files to a temporary folder (see `write_task_files`). Yield the folder and the hashes."""
    local = {task: path for task, path in tasks.items() if path}
    # Temporary, so that several evaluations can run at the same time.
    with tempfile.TemporaryDirectory(prefix="evaluation-") as scratch:
        yield (folder := Path(scratch, "tasks")), write_task_files(local, folder, list(tasks), bundle)


def score_models(
    models: Sequence[LoadedModel],
    tasks: Mapping[str, Path | None],
    folder: Path,
    definitions: Mapping[str, str],
    settings: EvaluationSettings,
    output: Path,
    *,
    cached: bool,
) -> list[ScoredModel]:
    """Score all models on all tasks, and write lm-eval's results to `output`.

    If `cached` is true, scores in .cache/evaluation are reused, and new scores are added there.

    Args:
        tasks: the local data file of each task, None for a task that reads from the Hub.
        folder, definitions: see `task_files`.
    """
    scored = []
    for model in models:
        scores: list[Metric] = []
        load, name, revision = functools.cache(model.load), model.column.name, str(model.column.revision)
        for task, source in tasks.items():
            # Everything that the scores depend on.
            key = dataclasses.asdict(settings) | {"harness": version("lm_eval"), "reading": READING}
            key |= {"model": revision, "task": task, "definition": definitions.get(task, "stock")}
            digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:20]
            path = CACHE / f"{task}-{digest}.json"
            stored = read_object(path) if cached else {}
            if stored.get("key") == key:
                logger.info("%s: reusing the cached scores of model %r", task, name)
            else:
                logger.info("%s: scoring on %s: model %r", task, settings.device, name)
                results, measured = _score_task(*load(), Job(task, settings, folder), folder.parent / revision)
                stored = {"key": key, "results": results, "scores": list(map(dataclasses.asdict, measured))}
                if cached:
                    _write(path, json.dumps(stored))
            if stored["results"]:
                _write(output / file_name(name) / f"{task}.json", to_json(stored["results"], indent=2) + "\n")
            # The harness reads a copy of the local file. The comparison names the original file.
            measured = from_json(list[Metric], stored["scores"])
            scores += [dataclasses.replace(one, data=str(source) if source else one.data) for one in measured]
        scored.append((model.column, scores))
    return scored


def overlapping_documents(
    prepared: PreparedData, tasks: Iterable[str], folder: Path, definitions: Mapping[str, str]
) -> set[str]:
    """Return the hashes of the documents of tasks that share text with training rows (see overlap.py).

    The result is stored in overlap.json in the prepared folder.
    """
    path = prepared.path / OVERLAP
    stored = read_object(path)
    keys = {task: f"{task} {definitions.get(task, version('lm_eval'))}" for task in tasks}
    if missing := [task for task, key in keys.items() if key not in stored]:
        texts = {task: texts_of(task, folder) for task in missing}
        ids = {name: encode(prepared.tokenizer, both) for each in texts.values() for name, both in each.items()}
        total = prepared.manifest.counts["train"].row_tokens
        flagged = find_overlaps(ids, prepared.rows("train").pieces(), total=total)
        stored |= {keys[task]: sorted(flagged & texts[task].keys()) for task in missing}
        _write(path, json.dumps(stored))
    return {name for key in keys.values() for name in stored[key]}


def texts_of(task: str, folder: Path) -> dict[str, list[str]]:
    """Return the texts of each document of a task, without few-shot examples, by the hash of the document."""
    from lm_eval.utils import handle_non_serializable, hash_string

    if task == COMPLETION:
        from gpt2_repro.evaluation.hellaswag import read_items

        items = read_items(_completion_source(folder))
        return {_hash_of(item): [f"{item.ctx} {ending}" for ending in item.endings] for item in items}
    texts: dict[str, list[str]] = {}
    with _one_line_errors(task):
        for loaded in task_index(folder, task).load([task])["tasks"].values():
            loaded.build_all_requests()
            for request in loaded.instances:
                form = {"indent": 2, "default": handle_non_serializable, "ensure_ascii": False}
                name = hash_string(json.dumps(request.doc, **form))  # as in lm_eval/evaluator.py (0.4.13)
                text = "".join(request.args).removeprefix(request.doc.get("shown", ""))
                texts.setdefault(name, []).append(text)
    return texts


def _completion_source(folder: Path) -> str:
    from gpt2_repro.evaluation.hellaswag import HUB_ID

    return str(next(folder.glob(f"{COMPLETION}-*.jsonl"), HUB_ID))


def _hash_of(item: Any) -> str:
    return hashlib.sha256(repr(item).encode()).hexdigest()


def _write(path: Path, text: str) -> None:
    """Write a file. If this fails, log a warning, because the scores took hours."""
    try:
        write_whole(path, text)
    except OSError as error:
        logger.warning("Could not write %s (%s).", path, error.strerror)


def _score_task(model: Any, tokenizer: Any, job: Job, model_folder: Path) -> Results:
    """Score a model on one task with all GPUs, or with this process on one device."""
    import torch

    gpus = torch.cuda.device_count() if job.settings.device == "cuda" else 1
    num_processes = min(gpus, job.settings.limit or gpus)  # the harness needs at least one document per process
    if num_processes == 1:
        return score_task(model, tokenizer, job)
    if not model_folder.exists():
        model.save_pretrained(model_folder)
        tokenization.save(tokenizer, model_folder)
    return score_launched(model_folder, job, num_processes=num_processes)


def score_task(model: Any, tokenizer: Any, job: Job, accelerator: Any = None) -> Results:
    """Score a model in fp32 on one task, and move the model to the CPU afterwards.

    Args:
        accelerator: an accelerate.Accelerator if several processes share the documents. The results of all ranks
            except rank 0 are empty.

    Raises UserError if the data of the task cannot be loaded, and RunFailed for scores that are not finite.
    """
    model.float().to(accelerator.device if accelerator else job.settings.device).eval()
    results: dict[str, Any] = {}
    if job.task == COMPLETION:
        metrics = [_score_completion(model, tokenizer, job, accelerator)]
    else:
        results, samples = evaluate_model(model, tokenizer, job, accelerator)
        metrics = read_scores(results, samples, tokenizer) if results else []
    model.to("cpu")  # frees the device for the next model
    return results, metrics


def _score_completion(model: Any, tokenizer: Any, job: Job, accelerator: Any) -> Metric:
    """Score HellaSwag as during training."""
    import torch

    from gpt2_repro.evaluation.hellaswag import HellaSwag, read_items
    from gpt2_repro.evaluation.scorer import added_start

    source = _completion_source(job.folder)
    items = read_items(source)[: job.settings.limit]
    hellaswag = HellaSwag(items, tokenizer, window=job.settings.max_length, start=added_start(tokenizer))
    rank, processes = (accelerator.process_index, accelerator.num_processes) if accelerator else (0, 1)
    own = hellaswag.rows[rank::processes]
    answers = _open_scorer(model, tokenizer, job, accelerator)._loglikelihood_tokens(
        [(None, ids[:-targets], ids[-targets:]) for ids, targets in own]
    )
    losses = torch.zeros(len(hellaswag.rows), dtype=torch.float64, device=model.device)
    means = [-total / targets for (total, _), (_, targets) in zip(answers, own, strict=True)]
    losses[rank::processes] = torch.tensor(means, dtype=torch.float64, device=model.device)
    if accelerator:
        losses = accelerator.reduce(losses, reduction="sum")
    if (right := hellaswag.right(losses.view(len(items), -1))) is None:
        raise RunFailed(f"{COMPLETION}: the loss of an ending is not finite. Check the run's metrics for such steps.")
    return completion_scores(right.tolist(), source, list(map(_hash_of, items)))


def _open_scorer(model: Any, tokenizer: Any, job: Job, accelerator: Any) -> Any:
    from gpt2_repro.evaluation.scorer import Scorer

    settings = job.settings
    scorer = Scorer(
        pretrained=model,
        tokenizer=tokenizer,
        max_length=settings.max_length,
        batch_size=settings.batch_size,
        positions=settings.positions,
        compares_options=job.task.startswith(core.PREFIX),
    )
    if accelerator:
        # HFLM (lm_eval 0.4.13) shares documents among processes only if it loads the model itself, and only on GPUs.
        scorer.accelerator = accelerator
        scorer._rank, scorer._world_size = accelerator.process_index, accelerator.num_processes
    return scorer


def evaluate_model(
    model: Any, tokenizer: Any, job: Job, accelerator: Any = None
) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Return lm-eval's results as JSON values, and its scored samples of each task (see `score_task`)."""
    from lm_eval import simple_evaluate
    from lm_eval.utils import handle_non_serializable

    for name in ("lm_eval", "transformers.tokenization_utils_base"):
        logging.getLogger(name).setLevel(logging.ERROR)
    settings = job.settings
    options: dict[str, Any] = {"batch_size": settings.batch_size, "device": settings.device, "limit": settings.limit}
    options |= dict.fromkeys(SEEDS, settings.seed)
    options |= {"bootstrap_iters": 0 if job.task.startswith(OWN_STANDARD_ERRORS) else 100_000}
    scorer = _open_scorer(model, tokenizer, job, accelerator)
    with _one_line_errors(job.task):
        index = task_index(job.folder, job.task)
        results = simple_evaluate(model=scorer, tasks=[job.task], task_manager=index, **options)
    if results is None:
        return {}, {}
    samples = results.pop("samples")
    return json.loads(json.dumps(results, default=handle_non_serializable)), samples


def fetch_data(tasks: Sequence[str], *, skip: bool = False) -> list[str]:
    """Load the data of tasks from the Hub into the cache, before models are scored for hours.

    Returns the tasks whose data is missing. Without `skip`, raises UserError instead.
    """
    absent = []
    check_hub()
    with tempfile.TemporaryDirectory(prefix="evaluation-") as scratch:
        # hellaswag_completion has the data of hellaswag.
        names = dict.fromkeys("hellaswag" if task == COMPLETION else task for task in tasks)
        write_task_files({}, Path(scratch), names)
        for task in names:
            try:
                with _one_line_errors(task):
                    task_index(Path(scratch), task).load([task])
            except UserError as error:
                if not skip:
                    raise
                logger.warning("%s is not scored. %s", task, error)
                absent += [task, *([COMPLETION] if task == "hellaswag" else [])]
    return absent


@contextlib.contextmanager
def _one_line_errors(task: str) -> Iterator[None]:
    from datasets.exceptions import DatasetsError

    try:
        with contextlib.redirect_stdout(sys.stderr):  # for the harness's progress, because stdout is for the table
            yield
    except (ConnectionError, DatasetsError) as error:
        fix = f"Check the network, or remove {task} from --tasks."
        if own := local_task(task):
            fix = f"Pass a folder with {own.files[0]} as --local_data."
        raise UserError(f"Cannot load the data of {task} ({in_a_line(error)}). {fix}") from None
    except OverflowError:
        why = f"{task}: a perplexity is too large to compute, because the model has diverged."
        raise RunFailed(f"{why} Score the other models without it.") from None


def launch_command(job: Path, num_processes: int) -> list[str]:
    """Return the command that runs this module's `main` in several processes."""
    launcher = [*LAUNCHERS["ddp"].command(num_processes), "--main_process_port", "0"]
    return [*launcher, "-m", "gpt2_repro.evaluation.harness", str(job)]


def score_launched(model: Path, job: Job, *, num_processes: int) -> Results:
    """Score a plain Hugging Face folder on one task with several processes (see `score_task`)."""
    with tempfile.TemporaryDirectory(prefix="lm_eval-") as scratch:
        path = Path(scratch, "job.pickle")
        path.write_bytes(pickle.dumps((str(model), job)))
        paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        environment = os.environ | {"PYTHONPATH": paths, "TOKENIZERS_PARALLELISM": "false"}
        command = launch_command(path, num_processes)
        if code := subprocess.run(command, env=environment, stdout=sys.stderr, check=False).returncode:
            raise RunFailed(f"Scoring {job.task} failed with exit code {code}. Fix the error above, then run again.")
        return pickle.loads(path.read_bytes())


def main(path: Path) -> None:
    """Score this process's share of the job in a file. Rank 0 replaces the file with the results of all."""
    import torch
    from accelerate import Accelerator, InitProcessGroupKwargs
    from transformers import AutoModelForCausalLM

    # The other ranks wait while rank 0 aggregates. Some tasks take longer than the default timeout of 10 minutes.
    accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(timeout=datetime.timedelta(days=1))])
    folder, job = pickle.loads(path.read_bytes())
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    results = score_task(model, load(folder), job, accelerator)
    if accelerator.is_main_process:
        path.write_bytes(pickle.dumps(results))
    accelerator.end_training()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
