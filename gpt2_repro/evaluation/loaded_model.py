"""The models of a table: opened once to see what they are, and again when there is something to score."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpt2_repro.errors import UserError
from gpt2_repro.evaluation.cache import fingerprint
from gpt2_repro.evaluation.provenance import CheckpointInfo


PADDING = 1024  # ids that a vocabulary may have beyond the tokenizer's: round sizes are fast


@dataclasses.dataclass(frozen=True)
class EvaluatedModel:
    """A model that can be loaded and fits its tokenizer."""

    checkpoint: CheckpointInfo
    load: Callable[[], tuple[Any, Any]]  # its model in fp32 on the CPU, and its tokenizer
    revision: str
    parameters: int
    positions: int

    @property
    def source(self) -> str:
        """Its folder or Hub id."""
        return self.checkpoint.source

    @property
    def name(self) -> str:
        """Its column's."""
        return self.checkpoint.name

    def folder(self, scratch: Path) -> Path:
        """A folder that any program loads it from, below `scratch`."""
        target = scratch / self.revision[:12]
        if not target.exists():
            model, tokenizer = self.load()
            model.save_pretrained(target)
            tokenizer.save_pretrained(target)
        return target


def open_model(checkpoint: CheckpointInfo, load: Callable[[], tuple[Any, Any]]) -> EvaluatedModel:
    """Load a model, look at it and let it go.

    Raises UserError where it cannot be loaded, has weights that are no numbers, or a tokenizer of another vocabulary.
    """
    model, tokenizer = load()
    for name, weight in model.named_parameters():
        if not bool(weight.isfinite().all()):
            raise UserError(
                f"{checkpoint.source} has weights that are no numbers, in {name}: name an earlier checkpoint"
            )
    vocabulary, tokens = model.config.vocab_size, len(tokenizer)
    if tokens > vocabulary or vocabulary - tokens > PADDING:
        raise UserError(
            f"the tokenizer of {checkpoint.source} has {tokens:,} tokens and its model {vocabulary:,}: put the files of the "
            "tokenizer that it was trained with into the folder"
        )
    positions = getattr(model.config, "max_position_embeddings", None) or 1 << 20
    return EvaluatedModel(checkpoint, load, fingerprint(model, tokenizer), model.num_parameters(), int(positions))
