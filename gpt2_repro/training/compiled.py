"""Whether the run that was to be compiled is, said after its first step: eager training costs half of the speed."""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel, TrainerCallback

from gpt2_repro.model.compilation import Graph
from gpt2_repro.model.document_mask import takes_lengths


logger = logging.getLogger(__name__)


def check_graphs(graphs: Sequence[Graph], *, n_layer: int, masks: bool = False) -> list[str]:
    """Return the problems of the compiled training step, one line each.

    Every layer's attention must be causal in the kernel, or be passed a document mask if `masks`. One process and
    DeepSpeed have one graph; under DDP torch cuts it at the buckets of gradients, so that their communication overlaps.
    """
    training = [graph for graph in graphs if graph.training]
    if not training:
        return [
            "nothing was compiled (is TORCHDYNAMO_DISABLE or TORCH_COMPILE_DISABLE set?): this run is eager and slow"
        ]
    problems = []
    found = {"causal": sum(graph.causal for graph in training), "masked": sum(graph.masked for graph in training)}
    expected = {"causal": 0 if masks else n_layer, "masked": n_layer if masks else 0}
    if found != expected:
        problems.append(f"the attentions are {found} in place of {expected}: the flash kernel or the mask is lost")
    if any(graph.logits for graph in training):
        problems.append("the logits of the whole batch are returned")
    return problems


def time_compilation(took: Callable[[float], None]) -> None:
    """Have `took` told how many seconds each compilation takes, those of backward passes too, which begin later."""
    began = 0.0

    def start(*_: Any) -> None:
        nonlocal began
        began = time.perf_counter()

    torch._dynamo.on_compile_start(start)
    torch._dynamo.on_compile_end(lambda *_: took(time.perf_counter() - began))


class CompilationReport(TrainerCallback):
    """After the first step, says what was compiled and hands it to `record`; a run that is not is warned of."""

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
