"""Report to tracking services such as wandb. A failing service never ends a run."""

import functools
import logging
import os
import uuid
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers.integrations import integration_utils
from transformers.integrations.integration_utils import WandbLogModel

from gpt2_repro.errors import UserError, did_you_mean
from gpt2_repro.files import write_whole


logger = logging.getLogger(__name__)

FAILURES_ALLOWED = 3
WANDB_ID = "wandb/run_id"  # a file in the run directory


def check_reporting(report_to: list[str]) -> None:
    """Raise UserError if a service in `report_to` is not installed or not supported."""
    known = integration_utils.INTEGRATION_TO_CALLBACK
    for name in report_to:
        if name not in integration_utils.get_available_reporting_integrations():
            fix = did_you_mean(name, known)
            if name in known:
                fix = f"Run `pip install {name}`."
            raise UserError(f"Cannot report to {name!r} (--report_to). {fix}")


def prepare_tracking(report_to: list[str], run_directory: Path) -> None:
    """Make wandb and tensorboard write to the run directory, and continue the wandb run on a resume.

    Without an API key, wandb records offline. This changes only environment variables, see `record_tracking`.
    """
    os.environ.setdefault("TENSORBOARD_LOGGING_DIR", str(run_directory / "tensorboard"))
    if "wandb" not in report_to or os.environ.get("RANK", "0") != "0":
        return
    from requests.utils import get_netrc_auth

    id_file = run_directory / WANDB_ID
    run_id = uuid.uuid4().hex[:12]
    if id_file.is_file():
        run_id = id_file.read_text(encoding="utf-8")
    os.environ.setdefault("WANDB_RUN_ID", run_id)
    os.environ.setdefault("WANDB_RESUME", "allow")
    os.environ.setdefault("WANDB_DIR", str(run_directory))
    os.environ.setdefault("WANDB_INIT_TIMEOUT", "20")
    if os.environ.get("WANDB_MODE") or os.environ.get("WANDB_API_KEY"):
        return
    if not get_netrc_auth("https://api.wandb.ai"):
        os.environ["WANDB_MODE"] = "offline"
        logger.info(
            "wandb has no API key and records offline in %s/wandb. Run `wandb sync` to upload the run.", run_directory
        )


def record_tracking(report_to: list[str], run_directory: Path) -> None:
    """Write the id of the wandb run to the run directory, for a resume. Call this on rank 0 only."""
    id_file = run_directory / WANDB_ID
    if "wandb" in report_to and not id_file.is_file():
        write_whole(id_file, os.environ["WANDB_RUN_ID"])


class Guarded:
    """Logs the exceptions of a callback. A method that has failed three times is not called again.

    It is no TrainerCallback, whose methods would hide `__getattr__`.
    """

    def __init__(self, callback: Any) -> None:
        self.callback = callback
        self.failures: Counter[str] = Counter()  # of each method

    def __getattr__(self, event: str) -> Callable[..., None]:
        if not event.startswith("on_"):
            raise AttributeError(event)
        return functools.partial(self.attempt, event)

    def attempt(self, method: str, *args: Any, **kwargs: Any) -> None:
        """Call a method of the callback. If it raises an exception, log a warning."""
        if self.failures[method] < FAILURES_ALLOWED:
            function = getattr(self.callback, method)
            self.guard(method, functools.partial(function, *args, **kwargs))

    def guard(self, method: str, call: Callable[[], None]) -> None:
        """Perform a call of `method`. If it raises an exception, log a warning."""
        try:
            call()
        # The run is paid for, so it continues after any exception. metrics.jsonl has all values.
        except Exception as error:
            self.failures[method] += 1
            name = type(self.callback).__name__
            then = "training continues"
            if self.failures[method] == FAILURES_ALLOWED:
                then = "this method is not called again"
            text = "The callback %s failed in %s with %s: %s (%s)"
            logger.warning(text, name, method, type(error).__name__, error, then)


class Tracker(Guarded):
    """A guarded callback that reports to a tracking service.

    `finish` calls its `on_train_end` after the final model is written, because a service can hang.
    """

    def __init__(self, callback: Any) -> None:
        super().__init__(callback)
        self._end: Callable[[], None] | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Open the service. TensorBoard hides the steps that were lost and are trained again."""
        writer = getattr(self.callback, "_SummaryWriter", None)
        if writer is not None and state.global_step:
            first = state.global_step + 1
            self.callback._SummaryWriter = functools.partial(writer, purge_step=first)
        self.attempt("on_train_begin", args, state, control, **kwargs)

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        """Keep the call for `finish`."""
        self._end = functools.partial(self.attempt, "on_train_end", *args, **kwargs)

    def finish(self, final: Path | None) -> None:
        """Close the service. With WANDB_LOG_MODEL, upload the final model first. Not a collective."""
        if self._end is None:
            return
        uploads = getattr(self.callback, "_log_model", None)
        if uploads is not None:
            # wandb and DVCLive would build another Trainer on rank 0 and save its model (transformers 5.23). Under FSDP2
            # and ZeRO-3 this is a collective that the other ranks do not enter.
            self.callback._log_model = WandbLogModel.FALSE
        if final is not None and uploads in (WandbLogModel.END, WandbLogModel.CHECKPOINT):
            self.guard("log_artifact", functools.partial(self._upload, final))
        self._end()

    def _upload(self, final: Path) -> None:
        wandb = self.callback._wandb
        if wandb.run is not None:
            artifact = wandb.Artifact(name=f"model-{wandb.run.id}", type="model")
            artifact.add_dir(str(final))
            wandb.run.log_artifact(artifact, aliases=["final_model"])


def guard_reporting(trainer: Any) -> None:
    """Catch exceptions of Trainer's reporting callbacks."""
    module = "transformers.integrations.integration_utils"
    callbacks: list[Any] = trainer.callback_handler.callbacks
    for position, callback in enumerate(callbacks):
        if type(callback).__module__ == module:
            callbacks[position] = Tracker(callback)


def finish_reporting(trainer: Any) -> None:
    """Close the tracking services. Call this after the final model is written and copied."""
    trainer.watchdog.arm()
    final = None
    if trainer.when.reason is None and trainer.is_world_process_zero():
        final = trainer.run.final
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, Tracker):
            callback.finish(final)
