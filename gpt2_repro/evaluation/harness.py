"""The call of lm-evaluation-harness: one loaded model, one fixed way to score it."""

import contextlib
import functools
import json
import logging
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gpt2_repro import hardware
from gpt2_repro.errors import UserError
from gpt2_repro.evaluation.statistics import perplexity_stderr


BOOTSTRAP_ITERATIONS = 100_000  # the harness's default


def choose_device(name: str | None) -> str:
    """The named device, or the first GPU, or the CPU. Raises UserError for one that does not work."""
    import torch

    if name is None:
        on_cpu = hardware.choose_device(use_cpu=False, accept_any_hardware=True, cpu_option="--device cpu")
        return "cpu" if on_cpu else "cuda"
    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"--device {name} does not work here ({reason}): type cpu, cuda or cuda:N") from None
    return name


def evaluate_model(
    model: Any,
    tokenizer: Any,
    *,
    tasks: Sequence[str],
    task_folder: Path | None,
    max_length: int,
    batch_size: int,
    device: str,
    limit: int | None,
    seed: int,
) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Score a model object in float32: the harness's results as plain JSON values, and its samples by task.

    Args:
        task_folder: what `write_task_files` wrote; its tasks win over the stock ones of the same name.
        max_length: window in tokens. Longer requests lose tokens on the left, so it is the same for all models
            of one table.
        limit: documents per task, None for all.

    Raises UserError where a task's data cannot be fetched.
    """
    from lm_eval import simple_evaluate
    from lm_eval.utils import handle_non_serializable

    for name in ("lm_eval", "transformers.tokenization_utils_base"):
        logging.getLogger(name).setLevel(logging.ERROR)
    # The harness prints progress; stdout belongs to the table.
    with contextlib.redirect_stdout(sys.stderr), _fast_bootstrap(), _missing_data_in_words():
        scorer = _scorer_class()(
            pretrained=model.float().to(device),
            tokenizer=tokenizer,
            max_length=max_length,
            batch_size=batch_size,
        )
        results = simple_evaluate(
            model=scorer,
            tasks=list(tasks),
            task_manager=_task_manager(task_folder, tuple(tasks)),
            batch_size=batch_size,
            device=device,
            limit=limit,
            bootstrap_iters=BOOTSTRAP_ITERATIONS,
            log_samples=True,
            random_seed=seed,
            numpy_random_seed=seed,
            torch_random_seed=seed,
            fewshot_random_seed=seed,
        )
    model.to("cpu")  # the next model gets the whole device
    samples = results.pop("samples")
    return json.loads(json.dumps(results, default=handle_non_serializable)), samples


def fetch_data(task: str, task_folder: Path | None) -> None:
    """Load a task's data once, before several processes want it. Raises UserError where it cannot be had."""
    with contextlib.redirect_stdout(sys.stderr), _missing_data_in_words():
        _task_manager(task_folder, (task,)).load([task])


@contextlib.contextmanager
def _missing_data_in_words() -> Iterator[None]:
    """What the Hub does not give, or does not have, as one line."""
    from datasets.exceptions import DatasetsError

    try:
        yield
    except (ConnectionError, DatasetsError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{reason}: mend the network, or type --local_data DIR with the tasks' files") from None


@contextlib.contextmanager
def _fast_bootstrap() -> Iterator[None]:
    """The harness's standard error of a perplexity, computed at once in place of 100,000 times one after the other."""
    from lm_eval.api import metrics

    theirs = metrics.bootstrap_stderr

    def ours(statistic: Any, values: Sequence[Any], iters: int) -> float:
        return (
            perplexity_stderr(values, iters) if statistic is metrics.perplexity else theirs(statistic, values, iters)
        )

    metrics.bootstrap_stderr = ours
    try:
        yield
    finally:
        metrics.bootstrap_stderr = theirs


@functools.cache
def _scorer_class() -> Any:
    """HFLM with one progress bar for the windows of whole documents, where lm_eval 0.4.13 draws one for each batch."""
    from lm_eval.models.huggingface import HFLM
    from tqdm import tqdm

    class Scorer(HFLM):
        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
            with tqdm(desc="Running rolling loglikelihood", unit=" windows", disable=disable_tqdm) as self.windows:
                return super().loglikelihood_rolling(requests, disable_tqdm=True)

        def _loglikelihood_tokens(
            self, requests: Any, disable_tqdm: bool = False, override_bs: int | None = None
        ) -> list[tuple[float, bool]]:
            if override_bs is not None:  # only rolling windows come in batches of their own
                self.windows.update(len(requests))
                disable_tqdm = True
            return super()._loglikelihood_tokens(requests, disable_tqdm=disable_tqdm, override_bs=override_bs)

    return Scorer


@functools.cache
def _task_manager(task_folder: Path | None, tasks: tuple[str, ...]) -> Any:
    """The harness's index of tasks. Its 14,000 stock tasks take ten seconds to read: only where one is asked for."""
    from lm_eval.tasks import TaskManager

    local = {path.stem for path in task_folder.glob("*.yaml")} if task_folder else set()
    return TaskManager(
        include_path=str(task_folder) if task_folder else None, include_defaults=not local.issuperset(tasks)
    )
