"""Tracking services report; they never ask for a login, and they never end a training."""

import logging
import netrc
import os
import uuid
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK, get_available_reporting_integrations

from gpt2_repro.errors import UserError, did_you_mean
from gpt2_repro.files import write_whole


logger = logging.getLogger(__name__)

FAILURES_ALLOWED = 3


def check_reporting(report_to: list[str]) -> None:
    """Raise UserError for a service that transformers does not know or that is not installed."""
    for name in report_to:
        if name not in INTEGRATION_TO_CALLBACK:
            raise UserError(
                f"there is no service {name!r} to report to: {did_you_mean(name, INTEGRATION_TO_CALLBACK)}"
            )
        if name not in get_available_reporting_integrations():
            raise UserError(f"--report_to {name} needs its package: pip install {name}")


def prepare_wandb(report_to: list[str], run: Path) -> None:
    """Choose the offline mode where no key is configured, before anything could ask for one; keep files in the run.

    A run that is resumed goes on in the same run of wandb: its id lies beside wandb's own files.
    """
    if "wandb" not in report_to or os.environ.get("RANK", "0") != "0":
        return
    noted = run / "wandb" / "run_id"
    if not noted.is_file():
        write_whole(noted, uuid.uuid4().hex[:12])
    os.environ.setdefault("WANDB_RUN_ID", noted.read_text())
    os.environ.setdefault("WANDB_RESUME", "allow")
    os.environ.setdefault("WANDB_DIR", str(run))
    os.environ.setdefault("WANDB_INIT_TIMEOUT", "20")
    if not (os.environ.get("WANDB_MODE") or os.environ.get("WANDB_API_KEY") or _key_in_netrc()):
        os.environ["WANDB_MODE"] = "offline"
        logger.info("wandb has no key: recording offline in %s/wandb; `wandb sync` uploads it later", run)


def _key_in_netrc() -> bool:
    try:
        return netrc.netrc().authenticators("api.wandb.ai") is not None
    except (OSError, netrc.NetrcParseError):
        return False


class Guarded(TrainerCallback):
    """A reporting callback whose failures are logged, and which is left out after three of them."""

    def __init__(self, callback: TrainerCallback) -> None:
        self.callback = callback
        self.failures = 0


def _guarded_event(event: str) -> Any:
    def call(self: Guarded, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.failures >= FAILURES_ALLOWED:
            return
        try:
            getattr(self.callback, event)(args, state, control, **kwargs)
        # Whatever a tracking service raises, a paid run goes on: metrics.jsonl has everything.
        except Exception as error:
            self.failures += 1
            name = type(self.callback).__name__
            last = "; it is left out from now on" if self.failures == FAILURES_ALLOWED else ""
            logger.warning("%s failed in %s: %s: %s%s", name, event, type(error).__name__, error, last)

    return call


for _event in [name for name in vars(TrainerCallback) if name.startswith("on_")]:
    setattr(Guarded, _event, _guarded_event(_event))


def guard_reporting(trainer: Trainer) -> None:
    """Put a guard around each reporting callback that Trainer built from report_to."""
    callbacks = trainer.callback_handler.callbacks
    for index, callback in enumerate(callbacks):
        if type(callback).__module__ == "transformers.integrations.integration_utils":
            callbacks[index] = Guarded(callback)
