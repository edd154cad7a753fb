"""What a person sees while a run goes on: one bar with the time left, and a line for each event."""

from collections.abc import Callable
from typing import Any

from tqdm import tqdm
from transformers import ProgressCallback

from gpt2_repro.baselines import GPT2, HELLASWAG_ITEMS
from gpt2_repro.reference_band import compared, explained, verdict
from gpt2_repro.units import duration


class ProgressBar(ProgressCallback):
    """transformers' bar, with readable lines, counting validation batches without a dataloader.

    Args:
        eval_batches: passes of the validation at a step.
        reference: whose curve the run is to follow, None where there is none: its band stands beside each validation
            loss, and the first one outside of it is told the usual causes.
    """

    def __init__(self, eval_batches: Callable[[int], int], reference: str | None = None) -> None:
        super().__init__()
        self.reference = reference
        self.told = False
        self.prediction_bar: tqdm | None = None
        self.eval_batches = eval_batches

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            self.training_bar = tqdm(
                total=state.max_steps,
                initial=state.global_step,
                desc="train",
                unit="step",
                dynamic_ncols=True,
                disable=args.disable_tqdm,  # the lines are written all the same
            )
        self.current_step = state.global_step

    def on_prediction_step(
        self, args: Any, state: Any, control: Any, eval_dataloader: Any = None, **kwargs: Any
    ) -> None:
        if state.is_world_process_zero:
            if self.prediction_bar is None:
                self.prediction_bar = tqdm(
                    total=self.eval_batches(state.global_step),
                    desc="validate",
                    unit="batch",
                    leave=False,
                    dynamic_ncols=True,
                    disable=args.disable_tqdm,
                )
            self.prediction_bar.update(1)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        event = logs or {}
        if (
            state.is_world_process_zero
            and self.training_bar is not None
            and (line := self._format(event, args, state))
        ):
            follows = self.reference is not None and "eval_loss" in event
            beside = compared(state.global_step, event["eval_loss"]) if follows else ""
            self.training_bar.write(
                f"step {state.global_step:>6}/{state.max_steps}  {line}{beside and f' · {beside}'}"
            )
            if beside and verdict(state.global_step, event["eval_loss"]) != "inside" and not self.told:
                self.told = True
                self.training_bar.write(explained(state.global_step, event["eval_loss"]))

    def _format(self, event: dict[str, Any], args: Any, state: Any) -> str:
        return format_event(event | {"step": state.global_step}, steps_left=args.last_step - state.global_step)


def further_set(key: str) -> str | None:
    """The name of the validation set whose loss this key of an event is; None for any other key."""
    return key[len("eval_") : -len("_loss")] or None if key.startswith("eval_") and key.endswith("_loss") else None


def format_event(event: dict[str, Any], steps_left: int = 0) -> str:
    """One event of metrics.jsonl for the terminal; '' for one that is no training or validation line.

    Args:
        steps_left: optimizer steps that are still to come, for the time that they take at the speed of the event.
    """
    if "eval_loss" in event:
        line = f"validation loss {event['eval_loss']:.4f} over {event['eval_tokens']:,} tokens"
        for key, loss in event.items():
            if (name := further_set(key)) is not None:
                line += f"; {name} {loss:.4f} over {event[f'eval_{name}_tokens']:,}"
        if "hellaswag_acc" in event:
            whole = event["hellaswag_items"] == HELLASWAG_ITEMS
            beside = f" (GPT-2 {GPT2.hellaswag:.4f})" if whole else f" of {event['hellaswag_items']:,} items"
            line += f"; HellaSwag {event['hellaswag_acc']:.4f}{beside}"
        return line
    if "loss" not in event:
        return ""
    tokens, speed = event.get("tokens", 0), event.get("tokens_per_second", 0)
    parts = [f"{_count(tokens)} tokens", f"loss {event['loss']:.4f}", f"lr {event['learning_rate']:.2e}"]
    if event.get("grad_norm") is not None:
        parts.append(f"norm {event['grad_norm']:.3f}")
    parts.append(f"{speed:,.0f} tok/s")
    if "mfu" in event:
        parts.append(f"mfu {event['mfu']:.1%}")
    if "padding" in event:
        parts.append(f"padding {event['padding']:.1%}")
    if "data_wait" in event:
        parts.append(f"wait {event['data_wait']:.1%}")
    if "usd" in event:
        parts.append(f"${event['usd']:,.2f}")
    if steps_left and speed and event.get("step"):
        # Training alone: validation and saving come on top.
        parts.append(f"{duration(tokens / event['step'] * steps_left / speed)} left")
    return "  ".join(parts)


def _count(tokens: int) -> str:
    """Three digits of a number of tokens."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if tokens >= size:
            return f"{tokens / size:.3g}{unit}" if tokens < 100 * size else f"{tokens / size:.0f}{unit}"
    return str(tokens)
