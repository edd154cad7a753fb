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
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from gpt2_repro import hardware, tokenization
from gpt2_repro.cli import Progress
from gpt2_repro.errors import RunFailed, UserError, in_a_line
from gpt2_repro.evaluation.comparison import EvaluationSettings
from gpt2_repro.evaluation.models import LoadedModel
from gpt2_repro.evaluation.output import file_name
from gpt2_repro.evaluation.scores import COMPLETION, Job, Metric, ScoredModel, completion_scores, read_scores
from gpt2_repro.evaluation.tasks import LOCAL_TASKS, OWN_STANDARD_ERRORS, task_index, write_task_files
from gpt2_repro.files import from_json, read_object, to_json, write_whole
from gpt2_repro.hardware import check_hub
from gpt2_repro.launchers import LAUNCHERS, ROOT
from gpt2_repro.tokenization import encode, load, start_id


logger = logging.getLogger(__name__)

NO_SEPARATOR = -1  # prefix of documents whose rows have no separator
SEEDS = ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed")
CACHE = Path(".cache/evaluation")
READING = 3  # increase it if the same model gets other scores from the same samples or texts
POSITIONS = 4096  # of a forward pass of HellaSwag, with padding; logits of GPT-2's vocabulary take 0.8 GB
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
        definitions = write_task_files(local, folder := Path(scratch, "tasks"), tasks)
        for model in models:
            scores: list[Metric] = []
            load, name, revision = functools.cache(model.load), model.column.name, str(model.column.revision)
            for task in tasks:
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
                    results, measured = _score_task(*load(), Job(task, settings, folder), Path(scratch, revision))
                    stored = {"key": key, "results": results, "scores": list(map(dataclasses.asdict, measured))}
                    if cached:
                        _write(path, json.dumps(stored))
                if stored["results"]:
                    _write(output / file_name(name) / f"{task}.json", to_json(stored["results"], indent=2) + "\n")
                # The harness reads a copy of the local file. The comparison names the original file.
                source = str(local[task]) if task in local else None
                measured = from_json(list[Metric], stored["scores"])
                scores += [dataclasses.replace(one, data=source or one.data) for one in measured]
            scored.append((model.column, scores))
    return scored


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

    from gpt2_repro.evaluation.hellaswag import HUB_ID, HellaSwag, read_items, target_losses

    source = str(next(job.folder.glob(f"{COMPLETION}-*.jsonl"), HUB_ID))
    items = read_items(source)[: job.settings.limit]
    scorer = HellaSwag(items, tokenizer, window=job.settings.max_length, start=_added_start(tokenizer))
    rank, processes = (accelerator.process_index, accelerator.num_processes) if accelerator else (0, 1)
    passes = -(-len(scorer.batches(POSITIONS)) // processes)
    bar = Progress(desc="HellaSwag, completion style", total=passes, unit=" passes", hidden=rank > 0)
    options: dict[str, Any] = {"process": rank, "processes": processes, "after_batch": bar.update}
    options |= {"positions": POSITIONS, "device": model.device}
    with torch.inference_mode(), bar:
        losses = scorer.losses(functools.partial(target_losses, model), **options)
    if accelerator:
        losses = accelerator.reduce(losses, reduction="sum")
    if (right := scorer.right(losses)) is None:
        raise RunFailed(f"{COMPLETION}: the loss of an ending is not finite. Check the run's metrics for such steps.")
    return completion_scores(right.tolist(), source, [hashlib.sha256(repr(one).encode()).hexdigest() for one in items])


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
    sizes = {"max_length": settings.max_length, "batch_size": settings.batch_size}
    scorer = _scorer_class()(pretrained=model, tokenizer=tokenizer, **sizes)
    if accelerator:
        # HFLM (lm_eval 0.4.13) shares documents among processes only if it loads the model itself, and only on GPUs.
        scorer.accelerator = accelerator
        scorer._rank, scorer._world_size = accelerator.process_index, accelerator.num_processes
    with _one_line_errors(job.task):
        index = task_index(job.folder, job.task)
        results = simple_evaluate(model=scorer, tasks=[job.task], task_manager=index, **options)
    if results is None:
        return {}, {}
    samples = results.pop("samples")
    return json.loads(json.dumps(results, default=handle_non_serializable)), samples


def fetch_data(tasks: Sequence[str]) -> None:
    """Load the data of tasks from the Hub into the cache, or raise UserError, before models are scored for hours."""
    check_hub()
    with tempfile.TemporaryDirectory(prefix="evaluation-") as scratch:
        # hellaswag_completion has the data of hellaswag.
        names = dict.fromkeys("hellaswag" if task == COMPLETION else task for task in tasks)
        write_task_files({}, Path(scratch), names)
        for task in names:
            with _one_line_errors(task):
                task_index(Path(scratch), task).load([task])


@contextlib.contextmanager
def _one_line_errors(task: str) -> Iterator[None]:
    from datasets.exceptions import DatasetsError

    try:
        with contextlib.redirect_stdout(sys.stderr):  # for the harness's progress, because stdout is for the table
            yield
    except (ConnectionError, DatasetsError) as error:
        fix = f"Check the network, or remove {task} from --tasks."
        if task in LOCAL_TASKS:
            fix = f"Pass a folder with {LOCAL_TASKS[task].files[0]} as --local_data."
        raise UserError(f"Cannot load the data of {task} ({in_a_line(error)}). {fix}") from None
    except OverflowError:
        why = f"{task}: a perplexity is too large to compute, because the model has diverged."
        raise RunFailed(f"{why} Score the other models without it.") from None


def _added_start(tokenizer: Any) -> list[int]:
    """Return the start token that the tokenizer of another project adds to all text."""
    # The models of such tokenizers need it. Ours add none.
    first: list[int] = tokenizer("")["input_ids"][:1]
    return first if first == [tokenizer.bos_token_id] else []


@functools.cache
def _scorer_class() -> Any:
    """Return a subclass of lm-eval's HFLM that encodes text as rows do."""
    from lm_eval.models.huggingface import HFLM

    class Scorer(HFLM):
        @property
        def prefix_token_id(self) -> int:
            start = start_id(self.tokenizer)
            return NO_SEPARATOR if start is None else start

        def tok_encode(self, string: str, *_: Any, left_truncate_len: int | None = None, **__: Any) -> list[int]:
            # HFLM (lm_eval 0.4.13) would add the tokens of the post-processor, and score them in rolling windows
            # (lm-evaluation-harness#3333).
            return encode(self.tokenizer, [string])[0][-(left_truncate_len or 0) :]

        def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
            before, after = super()._encode_pair(context, continuation)
            return [*self._start, *before], after

        @functools.cached_property
        def _start(self) -> list[int]:
            return _added_start(self.tokenizer)

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
            hidden = disable_tqdm or self.rank > 0
            with Progress(desc="Running rolling loglikelihood", unit=" windows", hidden=hidden) as self.windows:
                return super().loglikelihood_rolling(requests, disable_tqdm=True)

        def _loglikelihood_tokens(self, requests: Any, **options: Any) -> list[tuple[float, bool]]:
            # HFLM (lm_eval 0.4.13) would draw a new bar for each batch of windows.
            if options.get("override_bs") is not None:  # set only for rolling windows
                self.windows.update(len(requests))
                options["disable_tqdm"] = True
            # Without a separator, the first token of a document is only context, and a single token is not scored.
            alone = [before == [NO_SEPARATOR] and len(after) < 2 for _, before, after in requests]
            scorable = [
                (key, after[:1], after[1:]) if before == [NO_SEPARATOR] else (key, before, after)
                for (key, before, after), skipped in zip(requests, alone, strict=True)
                if not skipped
            ]
            scored = iter(super()._loglikelihood_tokens(scorable, **options))
            return [(0.0, True) if skipped else next(scored) for skipped in alone]

    return Scorer


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
