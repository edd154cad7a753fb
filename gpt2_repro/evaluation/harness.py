"""Score models on tasks with lm-evaluation-harness."""

import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from gpt2_repro import hardware
from gpt2_repro.errors import RunFailed, UserError, in_a_line
from gpt2_repro.evaluation.comparison import EvaluationSettings
from gpt2_repro.evaluation.core import CORE_TASK
from gpt2_repro.evaluation.models import OpenedModel
from gpt2_repro.evaluation.output import LIBRARIES, file_name, try_write
from gpt2_repro.evaluation.reading import read_scores
from gpt2_repro.evaluation.scores import COMPLETION, Metric, ScoredModel
from gpt2_repro.evaluation.tasks import OWN_STANDARD_ERRORS, TaskFiles, choose_index, one_line_errors
from gpt2_repro.evaluation.workers import Passes, Workers, start_workers
from gpt2_repro.files import from_json, read_object, to_json


logger = logging.getLogger(__name__)

CACHE = Path(".cache/evaluation")
READING = 10  # increase it if the same model gets other scores from the same samples or texts
# The harness's results of a task, and the scores that were read from the results and samples.
Results = tuple[dict[str, Any], list[Metric]]


@dataclasses.dataclass(frozen=True)
class CacheKey:
    """Everything that the scores of a task depend on.

    Args:
        model: the revision of the model.
        definition: the hash of the task files and data, "stock" for a task that lm-eval loads as it is.
    """

    model: str
    task: str
    definition: str
    settings: EvaluationSettings
    versions: dict[str, str]
    reading: int = READING

    @property
    def path(self) -> Path:
        """The file of the scores."""
        text = json.dumps(dataclasses.asdict(self), sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()[:20]
        return CACHE / f"{self.task}-{digest}.json"


def choose_device(name: str | None) -> str:
    """Return `name` if this device works, or the GPU, otherwise "cpu", if `name` is None."""
    import torch

    if name is None:
        on_cpu = hardware.uses_cpu(use_cpu=False, accept_any_hardware=True, cpu_option="--device cpu")
        if on_cpu:
            return "cpu"
        return hardware.gpu_kind() or "cpu"
    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UserError(f"--device {name} fails ({in_a_line(error)[:80]}). Pass cpu, cuda, cuda:N or mps.") from None
    return name


def choose_devices(name: str | None, processes: int | None) -> list[str]:
    """Return the device of each process that scores.

    Args:
        name: None or "cuda" for all GPUs, or a device such as "cuda:1" or "cpu".
        processes: the number of processes. By default one per GPU, or one.

    Raises UserError if a device does not work, or if there are fewer GPUs than processes.
    """
    import torch

    device = choose_device(name)
    if device != "cuda":
        if processes not in (None, 1) and device != "cpu":
            raise UserError(f"--processes {processes} needs --device cuda or --device cpu, instead of {device}.")
        return [device] * (processes or 1)
    gpus = torch.cuda.device_count()
    processes = processes or gpus
    if processes > gpus:
        raise UserError(f"--processes {processes}, but there are only {gpus} GPUs. Pass at most {gpus}.")
    if processes == 1:
        return [device]
    return [f"cuda:{number}" for number in range(processes)]


def score_models(
    models: Sequence[OpenedModel],
    tasks: TaskFiles,
    settings: EvaluationSettings,
    devices: Sequence[str],
    output: Path,
    *,
    cached: bool,
) -> list[ScoredModel]:
    """Score all models on all tasks on all devices, and write lm-eval's results to `output`.

    If `cached` is true, scores in .cache/evaluation are reused, and new scores are added there.
    """
    scored: list[ScoredModel] = []
    with contextlib.ExitStack() as stack:
        workers: Workers | None = None
        if len(devices) > 1:
            workers = stack.enter_context(start_workers(devices))
        for model in models:
            metrics = _score_model(model, tasks, settings, workers, output, cached=cached)
            scored.append((model.column, metrics))
    return scored


def _score_model(
    model: OpenedModel,
    tasks: TaskFiles,
    settings: EvaluationSettings,
    workers: Workers | None,
    output: Path,
    *,
    cached: bool,
) -> list[Metric]:
    name = model.column.name
    load = functools.cache(model.load)
    versions = {library: version(library) for library in (*LIBRARIES, "tokenizers")}
    scores: list[Metric] = []
    for task, source in tasks.sources.items():
        definition = tasks.hashes.get(task, "stock")
        key = CacheKey(model.column.revision, task, definition, settings, versions)
        stored: dict[str, Any] = {}
        if cached:
            stored = read_object(key.path)
        if stored.get("key") == dataclasses.asdict(key):
            logger.info("%s: reusing the cached scores of model %r", task, name)
        else:
            logger.info("%s: scoring on %s: model %r", task, settings.device, name)
            network, tokenizer = load()
            passes = workers.passes_of(model) if workers else None
            results, measured = score_task(network, tokenizer, task, tasks.folder, settings, passes)
            stored = {
                "key": dataclasses.asdict(key),
                "results": results,
                "scores": [dataclasses.asdict(metric) for metric in measured],
            }
            if cached:
                try_write(key.path, json.dumps(stored))
        path = output / file_name(name) / f"{task}.json"
        text = to_json(stored["results"], indent=2)
        try_write(path, f"{text}\n")
        for metric in from_json(list[Metric], stored["scores"]):
            if source:
                # The harness reads a copy of the local file. The comparison names the original file.
                details = dataclasses.replace(metric.details, data=str(source))
                metric = dataclasses.replace(metric, details=details)
            scores.append(metric)
    return scores


def score_task(
    model: Any,
    tokenizer: Any,
    task: str,
    folder: Path,
    settings: EvaluationSettings,
    passes: Passes | None = None,
) -> Results:
    """Score a model in fp32 on one task, and move the model to the CPU afterwards.

    Args:
        folder: its tasks (see `write_task_files`) replace lm-eval's tasks of the same names.
        passes: scores the batches in other processes. Without it, this process scores them.

    Raises UserError if the data of the task cannot be loaded, and RunFailed for scores that are not finite, and if the
    memory of a device is too small.
    """
    import torch

    model.float().eval()
    if passes is None:
        model.to(settings.device)
    try:
        results, samples = evaluate_model(model, tokenizer, task, folder, settings, passes)
    except torch.OutOfMemoryError:
        fix = f"Pass a --batch_size below {settings.batch_size}."
        raise RunFailed(f"{task}: the memory of the device is too small. {fix}") from None
    model.to("cpu")  # frees the device for the next model
    return results, read_scores(results, samples, tokenizer)


def evaluate_model(
    model: Any,
    tokenizer: Any,
    task: str,
    folder: Path,
    settings: EvaluationSettings,
    passes: Passes | None = None,
) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Return lm-eval's results as JSON values, and its scored samples of each task (see `score_task`)."""
    from lm_eval import evaluator
    from lm_eval.utils import handle_non_serializable

    from gpt2_repro.evaluation.scorer import Scorer

    for name in ("lm_eval", "transformers.tokenization_utils_base"):
        logging.getLogger(name).setLevel(logging.ERROR)
    scorer = Scorer(
        pretrained=model,
        tokenizer=tokenizer,
        max_length=settings.max_length,
        batch_size=settings.batch_size,
        per_token=task == COMPLETION,
        compares_options=task.startswith(CORE_TASK),
        passes=passes,
        generation_device=settings.device,
    )
    bootstrap_iters = 100_000
    if task.startswith(OWN_STANDARD_ERRORS):
        bootstrap_iters = 0
    with one_line_errors(task):
        index = choose_index(folder, task)
        evaluator.get_git_commit_hash = lambda: None  # git prints an error outside of a repository (lm_eval 0.4.13)
        results = evaluator.simple_evaluate(
            model=scorer,
            tasks=[task],
            task_manager=index,
            batch_size=settings.batch_size,
            device=settings.device,
            limit=settings.limit,
            bootstrap_iters=bootstrap_iters,
            random_seed=settings.seed,
            numpy_random_seed=settings.seed,
            torch_random_seed=settings.seed,
            fewshot_random_seed=settings.seed,
        )
    samples = results.pop("samples")
    text = json.dumps(results, default=handle_non_serializable)
    return json.loads(text), samples
