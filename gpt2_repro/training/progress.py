"""Print the progress bar and the log lines of a run."""

import re
import sys
from collections.abc import Callable
from typing import Any

from transformers import ProgressCallback

from gpt2_repro.cli import Progress
from gpt2_repro.evaluation.references import GPT2, HELLASWAG_ITEMS, compared
from gpt2_repro.text import duration


# The values of a line of the training log, in this order. Values that an event does not have are omitted.
LOG_LINE = {
    "tokens": "{:,} tokens",
    "loss": "loss {:.4f}",
    "learning_rate": "lr {:.2e}",
    "grad_norm": "norm {:.3f}",
    "tokens_per_second": "{:,.0f} tok/s",
    "mfu": "mfu {:.1%}",
    "peak_memory_gb": "peak {:.1f} GB",
    "padding": "padding {:.1%}",
    "data_wait": "data wait {:.1%}",
    "usd": "${:,.2f}",
}


class ProgressBar(ProgressCallback):
    """A progress bar that also prints one line for each logged event.

    Args:
        eval_batches: a function that takes a step, and returns the number of batches of its validation.
        reference: the name of a published run to compare validation losses with, or None.
    """

    def __init__(self, eval_batches: Callable[[int], int], reference: str | None = None) -> None:
        super().__init__()
        self.reference = reference
        self.prediction_bar: Progress | None = None
        self.eval_batches = eval_batches

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            self.current_step = state.global_step
            # Without a terminal the log lines are enough. They are also written if the bar is hidden.
            hidden = args.disable_tqdm or not sys.stderr.isatty()
            self.training_bar = Progress(
                total=state.max_steps, initial=state.global_step, desc="train", unit="step", hidden=hidden
            )

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            if self.prediction_bar is None:
                # The base class takes the number of batches from a dataloader, which our validation does not have.
                total = self.eval_batches(state.global_step)
                self.prediction_bar = Progress(
                    total=total, desc="validate", unit="batch", leave=False, hidden=args.disable_tqdm
                )
            self.prediction_bar.update(1)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        event = logs or {}
        step = state.global_step
        line = format_event(event | {"step": step}, steps_left=args.settings.last_step - step)
        if not line or not state.is_world_process_zero or self.training_bar is None:
            return
        if "eval_loss" in event:
            comparison = compared(self.reference, step, event["eval_loss"])
            if comparison:
                line += f" · {comparison}"
        self.training_bar.write(f"step {step:>6}/{state.max_steps}  {line}")
        sys.stdout.flush()


def format_event(event: dict[str, Any], steps_left: int = 0) -> str:
    """Return an event of metrics.jsonl as one line, or "" if the event has no loss.

    Args:
        event: a parsed line of metrics.jsonl.
        steps_left: the remaining optimizer steps, for an estimate of the remaining time. 0: no estimate.
    """
    if "eval_loss" in event:
        return _format_validation(event)
    if "loss" not in event:
        return ""
    parts: list[str] = []
    for key, form in LOG_LINE.items():
        if event.get(key) is not None:
            parts.append(form.format(event[key]))
    speed = event.get("tokens_per_second")
    if steps_left and speed and event.get("step"):
        # This is the time of training. Validation and saving are not included.
        parts.append(f"{duration(event['tokens'] / event['step'] * steps_left / speed)} left")
    return "  ".join(parts)


def _format_validation(event: dict[str, Any]) -> str:
    line = f"validation loss {event['eval_loss']:.4f} over {event['eval_tokens']:,} tokens"
    if "eval_bits_per_byte" in event:
        line += f", {event['eval_bits_per_byte']:.4f} bits per byte"
    for key in event:
        further_set = re.fullmatch("eval_(.+)_tokens", key)
        if further_set:
            name = further_set[1]
            line += f"; {name} {event[f'eval_{name}_loss']:.4f} over {event[key]:,}"
    if "hellaswag_acc" in event:
        items = event["hellaswag_items"]
        line += f"; HellaSwag {event['hellaswag_acc']:.4f}"
        line += f" (GPT-2 {GPT2.hellaswag:.4f})" if items == HELLASWAG_ITEMS else f" of {items:,} items"
    return line
