"""The models of a table: opened once to see what they are, and again when there is something to score."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpt2_repro.checkpoint import Checkpoint
from gpt2_repro.errors import UserError
from gpt2_repro.evaluation.cache import fingerprint


PADDING = 1024  # ids that a vocabulary may have beyond the tokenizer's: round sizes are fast


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A model that can be loaded and fits its tokenizer."""

    known: Checkpoint
    load: Callable[[], tuple[Any, Any]]  # its model in fp32 on the CPU, and its tokenizer
    revision: str
    parameters: int
    positions: int

    @property
    def name(self) -> str:
        """Its column's."""
        return self.known.name

    def folder(self, scratch: Path) -> Path:
        """A folder that any program loads it from, below `scratch`."""
        target = scratch / self.revision[:12]
        if not target.exists():
            model, tokenizer = self.load()
            model.save_pretrained(target)
            tokenizer.save_pretrained(target)
        return target


def open_model(known: Checkpoint, load: Callable[[], tuple[Any, Any]]) -> LoadedModel:
    """Load a model, look at it and let it go.

    Raises UserError where it cannot be loaded, has weights that are no numbers, or a tokenizer of another vocabulary.
    """
    model, tokenizer = load()
    for name, weight in model.named_parameters():
        if not bool(weight.isfinite().all()):
            raise UserError(f"{known.source} has weights that are no numbers, in {name}: name an earlier checkpoint")
    vocabulary, tokens = model.config.vocab_size, len(tokenizer)
    if tokens > vocabulary or vocabulary - tokens > PADDING:
        raise UserError(
            f"the tokenizer of {known.source} has {tokens:,} tokens and its model {vocabulary:,}: put the files of the "
            "tokenizer that it was trained with into the folder"
        )
    positions = getattr(model.config, "max_position_embeddings", None) or 1 << 20
    return LoadedModel(known, load, fingerprint(model, tokenizer), model.num_parameters(), int(positions))
