"""Run one task of lm-evaluation-harness on one model, on one device or all GPUs."""

import contextlib
import datetime
import functools
import json
import logging
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpt2_repro import hardware
from gpt2_repro.cli import Progress
from gpt2_repro.errors import RunFailed, UserError, in_a_line
from gpt2_repro.evaluation.scores import EvaluationSettings
from gpt2_repro.evaluation.tasks import LOCAL_TASKS, OWN_STANDARD_ERRORS
from gpt2_repro.launchers import LAUNCHERS
from gpt2_repro.tokenization import encode, load, start_id


ROOT = Path(__file__).parents[2]
ANSWER = "answer.pickle"
NO_SEPARATOR = -1  # prefix of documents whose rows have no separator
SEEDS = ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed")


def choose_device(name: str | None) -> str:
    """Return `name`, or the default device ("cuda" or "cpu") if `name` is None.

    Raises UserError if the device `name` does not work.
    """
    import torch

    if name is None:
        on_cpu = hardware.choose_device(use_cpu=False, accept_any_hardware=True, cpu_option="--device cpu")
        return "cpu" if on_cpu else "cuda"
    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0][:100]
        case = " in lower case" if name != name.lower() else ""
        fix = "Pass cpu, cuda or cuda:N" if torch.cuda.is_available() else "There is no usable GPU. Pass --device cpu"
        raise UserError(f"--device {name} does not work here ({reason}). {fix}{case}.") from None
    return name


def evaluate_model(
    model: Any,
    tokenizer: Any,
    task: str,
    settings: EvaluationSettings,
    task_folder: Path | None,
    accelerator: Any = None,
) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Score a model in fp32 on one task, and move the model to the CPU afterwards.

    Returns lm-eval's results as plain JSON values, and the scored samples of each task.

    Args:
        task_folder: a folder from `write_task_files`. Its tasks replace lm-eval's tasks of the same names.
        accelerator: an accelerate.Accelerator if several processes share the documents. All ranks except rank 0 return
            ({}, {}).

    Raises UserError if the data of the task cannot be loaded.
    """
    from lm_eval import simple_evaluate
    from lm_eval.utils import handle_non_serializable

    for name in ("lm_eval", "transformers.tokenization_utils_base"):
        logging.getLogger(name).setLevel(logging.ERROR)
    scorer = _scorer_class()(
        pretrained=model.float().to(accelerator.device if accelerator else settings.device),
        tokenizer=tokenizer,
        max_length=settings.max_length,
        batch_size=settings.batch_size,
    )
    if accelerator:
        # HFLM (lm_eval 0.4.13) shares documents among processes only if it loads the model itself, and only on GPUs.
        scorer.accelerator = accelerator
        scorer._rank, scorer._world_size = accelerator.process_index, accelerator.num_processes
    # The harness prints its progress to stdout, but stdout is for the table.
    with contextlib.redirect_stdout(sys.stderr), _missing_data_as_user_error(task):
        found = simple_evaluate(
            model=scorer,
            tasks=[task],
            task_manager=_task_manager(task_folder, task),
            batch_size=settings.batch_size,
            device=settings.device,
            limit=settings.limit,
            bootstrap_iters=0 if task.startswith(OWN_STANDARD_ERRORS) else 100_000,
            **dict.fromkeys(SEEDS, settings.seed),
        )
    model.to("cpu")  # frees the device for the next model
    if found is None:
        return {}, {}
    samples = found.pop("samples")
    return json.loads(json.dumps(found, default=handle_non_serializable)), samples


def fetch_data(task: str, task_folder: Path | None) -> None:
    """Load the data of a task into the cache, before several processes read it.

    Raises UserError if the data cannot be downloaded or read.
    """
    with contextlib.redirect_stdout(sys.stderr), _missing_data_as_user_error(task):
        _task_manager(task_folder, task).load([task])


@contextlib.contextmanager
def _missing_data_as_user_error(task: str) -> Iterator[None]:
    from datasets.exceptions import DatasetsError

    try:
        yield
    except (ConnectionError, DatasetsError) as error:
        fix = f"Check the network, or remove {task} from --tasks."
        if task in LOCAL_TASKS:
            fix = f"Pass a folder with {LOCAL_TASKS[task].files[0]} as --local_data."
        raise UserError(f"Cannot load the data of {task} ({in_a_line(error)}). {fix}") from None


@functools.cache
def _scorer_class() -> Any:
    """Return a subclass of lm-eval's HFLM that encodes text as rows do.

    It draws a single progress bar.
    """
    from lm_eval.models.huggingface import HFLM

    class Scorer(HFLM):
        @property
        def prefix_token_id(self) -> int:
            start = start_id(self.tokenizer)
            return NO_SEPARATOR if start is None else start

        def tok_encode(
            self, string: str, *args: Any, left_truncate_len: int | None = None, **options: Any
        ) -> list[int]:
            # HFLM (lm_eval 0.4.13) would add the tokens of the post-processor, and score them in rolling windows
            # (lm-evaluation-harness#3333).
            return encode(self.tokenizer, [string])[0][-(left_truncate_len or 0) :]

        def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
            before, after = super()._encode_pair(context, continuation)
            return [*self._start, *before], after

        @functools.cached_property
        def _start(self) -> list[int]:
            # Tokenizers of other projects can add a start token, and their models need it. Ours add none.
            first = self.tokenizer("")["input_ids"][:1]
            return first if first == [self.tokenizer.bos_token_id] else []

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


def _task_manager(task_folder: Path | None, task: str) -> Any:
    is_local = task_folder is not None and (task_folder / f"{task}.yaml").is_file()
    return _task_index(task_folder, with_stock_tasks=not is_local)


@functools.cache
def _task_index(task_folder: Path | None, *, with_stock_tasks: bool) -> Any:
    """Return a TaskManager for the tasks in `task_folder` and, if asked, stock tasks."""
    from lm_eval.tasks import TaskManager

    # Reading lm-eval's 14,000 stock tasks takes ten seconds.
    return TaskManager(include_path=str(task_folder) if task_folder else None, include_defaults=with_stock_tasks)


def launch_command(job: Path, num_processes: int) -> list[str]:
    """Return the command that runs this module's `main` in several processes."""
    launcher = [*LAUNCHERS["ddp"].command(num_processes), "--main_process_port", "0"]
    return [*launcher, "-m", "gpt2_repro.evaluation.harness", str(job)]


def evaluate_launched(
    model: Path, task: str, settings: EvaluationSettings, task_folder: Path, *, num_processes: int
) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Score a model on one task with several processes.

    `model` is a plain Hugging Face folder. Returns the same results and samples as `evaluate_model`.

    Raises RunFailed if a process fails.
    """
    with tempfile.TemporaryDirectory(prefix="lm_eval-") as scratch:
        job = Path(scratch, "job.pickle")
        job.write_bytes(pickle.dumps((str(model), task, settings, task_folder)))
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        environment = os.environ | {"PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false"}
        command = launch_command(job, num_processes)
        code = subprocess.run(command, env=environment, stdout=sys.stderr, check=False).returncode
        answer = job.with_name(ANSWER)
        if code or not answer.is_file():
            raise RunFailed(f"Scoring {task} failed with exit code {code}. Fix the error above, then run again.")
        return pickle.loads(answer.read_bytes())


def main(job: Path) -> None:
    """Score this process's share of the documents of a task.

    `job` is the file that `evaluate_launched` wrote. Rank 0 writes all results to a file next to `job`.
    """
    import torch
    from accelerate import Accelerator, InitProcessGroupKwargs
    from transformers import AutoModelForCausalLM

    folder, task, settings, task_folder = pickle.loads(job.read_bytes())
    # The other ranks wait while rank 0 aggregates. Some tasks take longer than the default timeout of 10 minutes.
    accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(timeout=datetime.timedelta(days=1))])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = load(folder)
    found = evaluate_model(model, tokenizer, task, settings, task_folder, accelerator)
    if accelerator.is_main_process:
        job.with_name(ANSWER).write_bytes(pickle.dumps(found))
    accelerator.end_training()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
