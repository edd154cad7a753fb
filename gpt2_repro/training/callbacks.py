"""Terminal output of a run: the progress bar, a line for each event, and a report about compilation."""

import logging
import re
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel, ProgressCallback, TrainerCallback

from gpt2_repro.cli import Progress
from gpt2_repro.formatting import duration
from gpt2_repro.model.compilation import Graph
from gpt2_repro.model.document_mask import takes_lengths
from gpt2_repro.references import GPT2, HELLASWAG_ITEMS, compared, explained, verdict


logger = logging.getLogger(__name__)


class ProgressBar(ProgressCallback):
    """transformers' bar, with readable lines, counting validation batches without a dataloader.

    Args:
        eval_batches: passes of the validation at a step.
        reference: the published run with the expected curve, or None. Its band is shown next to each validation loss.
            The usual causes are shown with the first loss outside of the band.
    """

    def __init__(self, eval_batches: Callable[[int], int], reference: str | None = None) -> None:
        super().__init__()
        self.reference = reference
        self.told = False
        self.prediction_bar: Progress | None = None
        self.eval_batches = eval_batches

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            steps = {"total": state.max_steps, "initial": state.global_step}
            # Without a terminal the lines of the log are enough. They are written without a bar too.
            hidden = args.disable_tqdm or not sys.stderr.isatty()
            self.training_bar = Progress(**steps, desc="train", unit="step", hidden=hidden)
        self.current_step = state.global_step

    def on_prediction_step(
        self, args: Any, state: Any, control: Any, eval_dataloader: Any = None, **kwargs: Any
    ) -> None:
        if state.is_world_process_zero:
            if self.prediction_bar is None:
                batches = self.eval_batches(state.global_step)
                look = {"unit": "batch", "leave": False, "hidden": args.disable_tqdm}
                self.prediction_bar = Progress(total=batches, desc="validate", **look)
            self.prediction_bar.update(1)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        event, step = logs or {}, state.global_step
        line = format_event(event | {"step": step}, steps_left=args.last_step - step)
        if not line or not state.is_world_process_zero or self.training_bar is None:
            return
        beside = compared(step, event["eval_loss"]) if self.reference and "eval_loss" in event else ""
        self.training_bar.write(f"step {step:>6}/{state.max_steps}  {line}{beside and f' · {beside}'}")
        if beside and not self.told and verdict(step, event["eval_loss"]) != "inside":
            self.told = True
            self.training_bar.write(explained(step, event["eval_loss"]))
        sys.stdout.flush()


# The values of a training line, in this order; an event may lack some.
PARTS = {
    "tokens": "{:,} tokens",
    "loss": "loss {:.4f}",
    "learning_rate": "lr {:.2e}",
    "grad_norm": "norm {:.3f}",
    "tokens_per_second": "{:,.0f} tok/s",
    "mfu": "mfu {:.1%}",
    "padding": "padding {:.1%}",
    "data_wait": "wait {:.1%}",
    "usd": "${:,.2f}",
}


def format_event(event: dict[str, Any], steps_left: int = 0) -> str:
    """Format an event of metrics.jsonl for the terminal; "" if it is neither training nor validation.

    Args:
        steps_left: remaining optimizer steps, for the time that they take at the speed of the event.
    """
    if "eval_loss" in event:
        line = f"validation loss {event['eval_loss']:.4f} over {event['eval_tokens']:,} tokens"
        for name in [key[len("eval_") : -len("_tokens")] for key in event if re.fullmatch("eval_.+_tokens", key)]:
            line += f"; {name} {event[f'eval_{name}_loss']:.4f} over {event[f'eval_{name}_tokens']:,}"
        if "hellaswag_acc" in event:
            whole = event["hellaswag_items"] == HELLASWAG_ITEMS
            beside = f" (GPT-2 {GPT2.hellaswag:.4f})" if whole else f" of {event['hellaswag_items']:,} items"
            line += f"; HellaSwag {event['hellaswag_acc']:.4f}{beside}"
        return line
    if "loss" not in event:
        return ""
    parts = [form.format(event[key]) for key, form in PARTS.items() if event.get(key) is not None]
    speed = event.get("tokens_per_second")
    if steps_left and speed and event.get("step"):
        # Training alone: validation and saving come on top.
        parts.append(f"{duration(event['tokens'] / event['step'] * steps_left / speed)} left")
    return "  ".join(parts)


def check_graphs(graphs: Sequence[Graph], *, n_layer: int, masks: bool = False) -> list[str]:
    """Return the problems of the compiled training step, one line each.

    Every layer's attention must be causal in the kernel, or be passed a document mask if `masks`. One process and
    DeepSpeed have one graph; under DDP torch cuts it at the buckets of gradients, so that their communication overlaps.
    """
    training = [graph for graph in graphs if graph.training]
    if not training:
        return ["nothing was compiled, this run is slow: unset TORCHDYNAMO_DISABLE and TORCH_COMPILE_DISABLE"]
    problems = []
    found = {"causal": sum(graph.causal for graph in training), "masked": sum(graph.masked for graph in training)}
    expected = {"causal": 0 if masks else n_layer, "masked": n_layer if masks else 0}
    if found != expected:
        problems.append(f"the attentions are {found} in place of {expected}: the flash kernel or the mask is lost")
    if any(graph.logits for graph in training):
        problems.append("the logits of the whole batch are returned")
    return problems


def time_compilation(took: Callable[[float], None]) -> None:
    """Call `took` with the seconds of each compilation. Those of backward passes begin later."""
    began = 0.0

    def start(*_: Any) -> None:
        nonlocal began
        began = time.perf_counter()

    torch._dynamo.on_compile_start(start)
    torch._dynamo.on_compile_end(lambda *_: took(time.perf_counter() - began))


class CompilationReport(TrainerCallback):
    """Log and `record` after the first step what was compiled, with a warning for each problem."""

    def __init__(self, model: PreTrainedModel, *, record: Callable[[dict[str, Any]], None]) -> None:
        self.graphs, self.n_layer, self.record = model.compiled_graphs, model.config.num_hidden_layers, record
        self.masks = model.documents is not None and not takes_lengths(model)
        self.began: float | None = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.began = self.began or time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.began is None:
            return
        problems = check_graphs(self.graphs, n_layer=self.n_layer, masks=self.masks)
        for problem in problems:
            logger.warning("compilation: %s", problem)
        if not problems:
            kind, seconds = "masked" if self.masks else "causal", time.perf_counter() - self.began
            graphs = sum(graph.training for graph in self.graphs)
            told = "compiled: %d graph(s), %d %s attentions, no logits; first step %.0f s"
            logger.info(told, graphs, self.n_layer, kind, seconds)
        self.record({"compiled": bool(self.graphs), "compilation_problems": problems})
        self.on_step_begin = self.on_step_end = lambda *args, **kwargs: None  # type: ignore[method-assign]
