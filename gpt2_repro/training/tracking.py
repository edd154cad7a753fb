"""Report to tracking services such as wandb. A failing service never ends a run."""

import functools
import html
import logging
import netrc
import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from gpt2_repro.errors import UserError, did_you_mean
from gpt2_repro.files import write_whole


if TYPE_CHECKING:
    from transformers import Trainer

logger = logging.getLogger(__name__)

FAILURES_ALLOWED = 3
TOKENS = "train/tokens"  # the name that transformers uses in wandb


def check_reporting(report_to: list[str]) -> None:
    """Raise UserError if a service in `report_to` is not installed or not supported."""
    if not report_to:
        return
    # This import takes seconds, and the next mistake should be reported at once.
    from transformers.integrations.integration_utils import (
        INTEGRATION_TO_CALLBACK,
        get_available_reporting_integrations,
    )

    for name in report_to:
        if "," in name:
            raise UserError(f"--report_to {name} has a comma. Separate services with spaces.")
        if name not in get_available_reporting_integrations():
            names = INTEGRATION_TO_CALLBACK
            fix = f"Run `pip install {name}`." if name in names else did_you_mean(name, names)
            raise UserError(f"Cannot report to {name!r} (--report_to). {fix}")


def prepare_wandb(report_to: list[str], run: Path) -> None:
    """Make wandb write to the run directory, and continue the wandb run on a resume.

    Without an API key, wandb records offline.
    """
    if "wandb" not in report_to or os.environ.get("RANK", "0") != "0":
        return
    noted = run / "wandb" / "run_id"
    if not noted.is_file():
        write_whole(noted, uuid.uuid4().hex[:12])
    os.environ.setdefault("WANDB_RUN_ID", noted.read_text(encoding="utf-8"))
    os.environ.setdefault("WANDB_RESUME", "allow")
    os.environ.setdefault("WANDB_DIR", str(run))
    os.environ.setdefault("WANDB_INIT_TIMEOUT", "20")
    if not (os.environ.get("WANDB_MODE") or os.environ.get("WANDB_API_KEY") or _key_in_netrc()):
        os.environ["WANDB_MODE"] = "offline"
        logger.info("wandb has no API key and records offline in %s/wandb. Run `wandb sync` to upload the run.", run)


def _key_in_netrc() -> bool:
    try:
        return netrc.netrc().authenticators("api.wandb.ai") is not None
    except (OSError, netrc.NetrcParseError):
        return False


class Guarded(TrainerCallback):
    """Logs the exceptions of a reporting callback.

    After three exceptions, the callback is disabled.
    """

    def __init__(self, callback: Any) -> None:
        self.callback = callback
        self.failures = 0

    def attempt(self, what: str, call: Callable[[], Any]) -> None:
        """Call the function `call`. If `call` raises an exception, log a warning.

        Args:
            what: the name of the called method, for the log message.
        """
        if self.failures >= FAILURES_ALLOWED:
            return
        try:
            call()
        # The run is paid for, so it continues after any exception. metrics.jsonl has all values.
        except Exception as error:
            self.failures += 1
            name = type(self.callback).__name__
            last = "it is disabled from now on" if self.failures == FAILURES_ALLOWED else "training continues"
            logger.warning(
                "The callback %s failed in %s with %s: %s (%s)", name, what, type(error).__name__, error, last
            )


def _guarded_event(event: str) -> Any:
    def call(self: Guarded, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.attempt(event, lambda: getattr(self.callback, event)(args, state, control, **kwargs))

    return call


for _event in [name for name in vars(TrainerCallback) if name.startswith("on_")]:
    setattr(Guarded, _event, _guarded_event(_event))


class WandbPage(TrainerCallback):
    """Shows text samples in wandb, and plots all curves over the trained tokens."""

    def __init__(self, wandb: Any) -> None:
        self.wandb = wandb

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            # With the callback of transformers (5.23), the horizontal axis is the step.
            self.wandb.define_metric(TOKENS)
            self.wandb.define_metric("*", step_metric=TOKENS, step_sync=True)

    def show(self, text: str, tokens: int) -> None:
        """Show a text sample in wandb.

        Args:
            tokens: the number of target tokens trained before the sample was generated.
        """
        page = self.wandb.Html(f"<pre style='white-space: pre-wrap'>{html.escape(text)}</pre>")
        self.wandb.log({"sample": page, TOKENS: tokens})


def guard_reporting(trainer: "Trainer") -> None:
    """Catch exceptions of Trainer's reporting callbacks, and show samples in wandb."""
    guarded: list[Any] = []
    for callback in trainer.callback_handler.callbacks:
        if type(callback).__module__ == "transformers.integrations.integration_utils":
            guarded.append(Guarded(callback))
            guarded += [Guarded(WandbPage(callback._wandb))] if hasattr(callback, "_wandb") else []
        else:
            guarded.append(callback)
    trainer.callback_handler.callbacks[:] = guarded


def report_text(trainer: "Trainer", text: str) -> None:
    """Show a text sample in wandb, if the run reports to wandb."""
    for guarded in trainer.callback_handler.callbacks:
        if isinstance(guarded, Guarded) and isinstance(guarded.callback, WandbPage):
            show = functools.partial(guarded.callback.show, text, trainer.state.num_input_tokens_seen)
            guarded.attempt("show", show)
