"""Report to tracking services such as wandb. A failing service never ends a run."""

import functools
import logging
import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers.integrations import integration_utils

from gpt2_repro.errors import UserError, did_you_mean
from gpt2_repro.files import write_whole


logger = logging.getLogger(__name__)

FAILURES_ALLOWED = 3


def check_reporting(report_to: list[str]) -> None:
    """Raise UserError if a service in `report_to` is not installed or not supported."""
    known = integration_utils.INTEGRATION_TO_CALLBACK
    for name in report_to:
        if name not in integration_utils.get_available_reporting_integrations():
            fix = f"Run `pip install {name}`." if name in known else did_you_mean(name, known)
            raise UserError(f"Cannot report to {name!r} (--report_to). {fix}")


def prepare_tracking(report_to: list[str], run: Path) -> None:
    """Make wandb and tensorboard write to the run directory, and continue the wandb run on a resume.

    Without an API key, wandb records offline.
    """
    os.environ.setdefault("TENSORBOARD_LOGGING_DIR", str(run / "tensorboard"))
    if "wandb" not in report_to or os.environ.get("RANK", "0") != "0":
        return
    from requests.utils import get_netrc_auth

    run_id = run / "wandb" / "run_id"
    if not run_id.is_file():
        write_whole(run_id, uuid.uuid4().hex[:12])
    settings = {"RUN_ID": run_id.read_text(encoding="utf-8"), "RESUME": "allow", "DIR": str(run), "INIT_TIMEOUT": "20"}
    for name, value in settings.items():
        os.environ.setdefault(f"WANDB_{name}", value)
    if not (os.environ.get("WANDB_MODE") or os.environ.get("WANDB_API_KEY") or get_netrc_auth("https://api.wandb.ai")):
        os.environ["WANDB_MODE"] = "offline"
        logger.info("wandb has no API key and records offline in %s/wandb. Run `wandb sync` to upload the run.", run)


class Guarded:
    """Logs the exceptions of a reporting callback, and disables it after three.

    It is no TrainerCallback, whose methods would hide `__getattr__`.
    """

    def __init__(self, callback: Any) -> None:
        self.callback = callback
        self.failures = 0

    def __getattr__(self, event: str) -> Callable[..., None]:
        if not event.startswith("on_"):
            raise AttributeError(event)
        return functools.partial(self.attempt, event)

    def attempt(self, method: str, *args: Any, **kwargs: Any) -> None:
        """Call a method of the callback. If it raises an exception, log a warning."""
        if self.failures >= FAILURES_ALLOWED:
            return
        try:
            getattr(self.callback, method)(*args, **kwargs)
        # The run is paid for, so it continues after any exception. metrics.jsonl has all values.
        except Exception as error:
            self.failures += 1
            name, kind = type(self.callback).__name__, type(error).__name__
            last = "it is disabled from now on" if self.failures == FAILURES_ALLOWED else "training continues"
            logger.warning("The callback %s failed in %s with %s: %s (%s)", name, method, kind, error, last)


def guard_reporting(trainer: Any) -> None:
    """Catch exceptions of Trainer's reporting callbacks."""
    module = "transformers.integrations.integration_utils"
    callbacks: list[Any] = trainer.callback_handler.callbacks
    callbacks[:] = [Guarded(each) if type(each).__module__ == module else each for each in callbacks]
