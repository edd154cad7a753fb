"""Score models on tasks with lm-evaluation-harness, on one device or all GPUs."""

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
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from gpt2_repro import hardware, tokenization
from gpt2_repro.errors import RunFailed, UserError, in_a_line
from gpt2_repro.evaluation.comparison import EvaluationSettings
from gpt2_repro.evaluation.models import LoadedModel
from gpt2_repro.evaluation.output import file_name, try_write
from gpt2_repro.evaluation.scores import COMPLETION, Job, Metric, ScoredModel, read_scores
from gpt2_repro.evaluation.tasks import OWN_STANDARD_ERRORS, TaskFiles, load_task, one_line_errors, task_index
from gpt2_repro.files import from_json, read_object, to_json
from gpt2_repro.launchers import LAUNCHERS, ROOT


logger = logging.getLogger(__name__)

SEEDS = ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed")
CACHE = Path(".cache/evaluation")
READING = 6  # increase it if the same model gets other scores from the same samples or texts
# The harness's results of a task, and the scores that were read from the results and samples.
Results = tuple[dict[str, Any], list[Metric]]


def choose_device(name: str | None) -> str:
    """Return `name` if this device works, or the GPU, otherwise "cpu", if `name` is None."""
    import torch

    if name is None:
        on_cpu = hardware.choose_device(use_cpu=False, accept_any_hardware=True, cpu_option="--device cpu")
        return "cpu" if on_cpu else hardware.gpu_kind() or "cpu"
    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UserError(f"--device {name} fails ({in_a_line(error)[:80]}). Pass cpu, cuda, cuda:N or mps.") from None
    return name


def score_models(
    models: Sequence[LoadedModel], tasks: TaskFiles, settings: EvaluationSettings, output: Path, *, cached: bool
) -> list[ScoredModel]:
    """Score all models on all tasks, and write lm-eval's results to `output`.

    If `cached` is true, scores in .cache/evaluation are reused, and new scores are added there.
    """
    scored = []
    for model in models:
        scores: list[Metric] = []
        load, name, revision = functools.cache(model.load), model.column.name, model.column.revision
        for task, source in tasks.sources.items():
            # Everything that the scores depend on.
            key = dataclasses.asdict(settings) | {"harness": version("lm_eval"), "reading": READING}
            key |= {"model": revision, "task": task, "definition": tasks.hashes.get(task, "stock")}
            digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:20]
            path = CACHE / f"{task}-{digest}.json"
            stored = read_object(path) if cached else {}
            if stored.get("key") == key:
                logger.info("%s: reusing the cached scores of model %r", task, name)
            else:
                logger.info("%s: scoring on %s: model %r", task, settings.device, name)
                results, measured = _score_task(*load(), Job(task, settings, tasks.folder), tasks.folder / revision)
                stored = {"key": key, "results": results, "scores": list(map(dataclasses.asdict, measured))}
                if cached:
                    try_write(path, json.dumps(stored))
            try_write(output / file_name(name) / f"{task}.json", to_json(stored["results"], indent=2) + "\n")
            # The harness reads a copy of the local file. The comparison names the original file.
            measured = from_json(list[Metric], stored["scores"])
            scores += [dataclasses.replace(one, data=str(source) if source else one.data) for one in measured]
        scored.append((model.column, scores))
    return scored


def _score_task(model: Any, tokenizer: Any, job: Job, model_folder: Path) -> Results:
    """Score a model on one task with all GPUs, or with this process on one device."""
    import torch

    num_processes = torch.cuda.device_count() if job.settings.device == "cuda" else 1
    if num_processes > 1:  # the harness needs a document of each task (of a group) in each process
        documents = [len(task.eval_docs) for task in load_task(job.task, job.folder)]
        num_processes = min(num_processes, job.settings.limit or num_processes, *documents)
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
    results, samples = evaluate_model(model, tokenizer, job, accelerator)
    model.to("cpu")  # frees the device for the next model
    return results, read_scores(results, samples, tokenizer) if results else []


def evaluate_model(
    model: Any, tokenizer: Any, job: Job, accelerator: Any = None
) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Return lm-eval's results as JSON values, and its scored samples of each task (see `score_task`)."""
    from lm_eval import evaluator
    from lm_eval.utils import handle_non_serializable

    from gpt2_repro.evaluation.scorer import Scorer

    for name in ("lm_eval", "transformers.tokenization_utils_base"):
        logging.getLogger(name).setLevel(logging.ERROR)
    settings = job.settings
    scorer = Scorer(
        pretrained=model,
        tokenizer=tokenizer,
        max_length=settings.max_length,
        batch_size=settings.batch_size,
        per_token=job.task == COMPLETION,
    )
    if accelerator:
        # HFLM (lm_eval 0.4.13) shares documents among processes only if it loads the model itself, and only on GPUs.
        scorer.accelerator = accelerator
        scorer._rank, scorer._world_size = accelerator.process_index, accelerator.num_processes
    with one_line_errors(job.task):
        index = task_index(job.folder, job.task)
        evaluator.get_git_commit_hash = lambda: None  # git prints an error outside of a repository (lm_eval 0.4.13)
        results = evaluator.simple_evaluate(
            model=scorer,
            tasks=[job.task],
            task_manager=index,
            batch_size=settings.batch_size,
            device=settings.device,
            limit=settings.limit,
            bootstrap_iters=0 if job.task.startswith(OWN_STANDARD_ERRORS) else 100_000,
            **dict.fromkeys(SEEDS, settings.seed),
        )
    if results is None:
        return {}, {}
    samples = results.pop("samples")
    return json.loads(json.dumps(results, default=handle_non_serializable)), samples


def launch_command(job: Path, num_processes: int) -> list[str]:
    """Return the command that runs this module's `main` in several processes."""
    launcher = LAUNCHERS["ddp"].command("--num_processes", str(num_processes), "--main_process_port", "0")
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
    results = score_task(model, tokenization.load(folder), job, accelerator)
    if accelerator.is_main_process:
        path.write_bytes(pickle.dumps(results))
    accelerator.wait_for_everyone()  # gloo can abort a rank that ends while others still work
    accelerator.end_training()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
