"""The models of a comparison, each loaded once to inspect it."""

import dataclasses
import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from typing import Any

from gpt2_repro.checkpoint import Checkpoint
from gpt2_repro.comparison import ComparedModel
from gpt2_repro.errors import UserError


logger = logging.getLogger(__name__)

PADDING = 1024  # ids that a vocabulary may have beyond the tokenizer's: round sizes are fast


Load = Callable[[], tuple[Any, Any]]  # returns a model in fp32 on the CPU, and its tokenizer


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A model that was loaded once to inspect it, and is loaded again if there is something to score.

    Args:
        column: how the comparison shows it.
        positions: beyond which it computes nothing.
    """

    column: ComparedModel
    checkpoint: Checkpoint
    load: Load
    positions: int

    @property
    def name(self) -> str:
        """The name of its column."""
        return self.checkpoint.name

    @property
    def trained_window(self) -> int:
        """The tokens it was trained to see at once: its positions, or its run's shorter sequences."""
        return self.checkpoint.window(self.positions)


def open_model(checkpoint: Checkpoint, load: Load) -> LoadedModel:
    """Load a model, inspect it and drop it.

    Raises UserError if it cannot be loaded or has a tokenizer of another vocabulary.
    """
    model, tokenizer = load()
    vocabulary, tokens = model.config.vocab_size, len(tokenizer)
    if tokens > vocabulary or vocabulary - tokens > PADDING:
        found = f"The tokenizer of {checkpoint.source} has {tokens:,} tokens and its model {vocabulary:,}."
        raise UserError(f"{found} Put the files of its own tokenizer into the folder.")
    positions = int(getattr(model.config, "max_position_embeddings", None) or 1 << 20)
    described = checkpoint.name, checkpoint.source, model.num_parameters(), checkpoint.tokens_trained
    return LoadedModel(ComparedModel(*described, fingerprint(model, tokenizer)), checkpoint, load, positions)


def fingerprint(model: Any, tokenizer: Any) -> str:
    """Return the revision of a model: a hash of its weights, configuration and tokenizer."""
    config = {key: value for key, value in model.config.to_dict().items() if key not in ("_name_or_path", "dtype")}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for name, weight in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(weight.shape)}".encode())
        digest.update(weight.detach().cpu().contiguous().numpy().data)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    digest.update((backend.to_str() if backend else json.dumps(tokenizer.get_vocab(), sort_keys=True)).encode())
    return digest.hexdigest()


def common_window(models: Sequence[LoadedModel], asked: int, *, explicit: bool) -> int:
    """Return the widest window up to `asked` that every model was trained on.

    Args:
        explicit: the number was passed as an option. Take it if the models have positions for it, trained or not.
    """
    shortest = min(models, key=lambda model: model.trained_window)
    window = min(asked, shortest.trained_window)
    if explicit and window < asked <= min(model.positions for model in models):
        logger.warning("window %d tokens: %s has random positions after %d", asked, shortest.name, window)
        return asked
    if window < asked:
        logger.warning("window %d tokens in place of %d: %s was trained on no more", window, asked, shortest.name)
    return window
