"""Find the size, window and revision of each model of a comparison."""

import dataclasses
import functools
import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gpt2_repro.errors import UserError
from gpt2_repro.evaluation.comparison import ComparedModel
from gpt2_repro.model.checkpoint import Checkpoint
from gpt2_repro.model.size import max_positions
from gpt2_repro.tokenization import PROBE, encode, start_id


logger = logging.getLogger(__name__)

PADDING = 1024  # a model may have up to this many ids more than its tokenizer, because round sizes are fast


@dataclasses.dataclass(frozen=True)
class OpenedModel:
    """A model to score."""

    column: ComparedModel  # its properties for the comparison table
    load: Callable[[], tuple[Any, Any]]  # returns the model in fp32 on the CPU, and its tokenizer
    positions: int  # maximum input length in tokens
    window: int  # length of the training sequences in tokens
    setting: str = ""  # the same text for models that differ only in the seed
    seed_key: str = ""  # the seed and the seed of the data as text


def open_model(checkpoint: Checkpoint, load: Callable[[], tuple[Any, Any]] | None = None) -> OpenedModel:
    """Load a model, and return its size, revision and maximum input length.

    The weights are not kept in memory. `load` replaces the function that loads the checkpoint.

    Raises UserError if the model cannot be loaded, or if its vocabulary does not match its tokenizer.
    """
    from gpt2_repro.model.load import load_pair

    if load is None:
        load = functools.partial(load_pair, checkpoint.copy or checkpoint.source)
    model, tokenizer = load()
    vocabulary = model.config.vocab_size
    tokens = len(tokenizer)
    if tokens > vocabulary or vocabulary - tokens > PADDING:
        sizes = f"the tokenizer has {tokens:,} tokens, but the model has {vocabulary:,} ids"
        raise UserError(f"{checkpoint.source}: {sizes}. Pass a folder with this model and its own tokenizer files.")
    checkpoint.log_weights()
    column = ComparedModel(
        name=checkpoint.name,
        source=checkpoint.source,
        parameters=model.num_parameters(),
        tokens_trained=checkpoint.tokens_trained,
        revision=fingerprint(model, tokenizer),
        has_separator=start_id(tokenizer) is not None,
        is_local=bool(checkpoint.copy) or Path(checkpoint.source).exists(),
        weights=checkpoint.weights,
    )
    positions = max_positions(model.config)
    setting, seed_key = _setting_of(checkpoint)
    return OpenedModel(
        column=column,
        load=load,
        positions=positions,
        window=checkpoint.window(positions),
        setting=setting,
        seed_key=seed_key,
    )


def load_untrained(source: str, seed: int) -> tuple[Any, Any]:
    """Return an untrained model with the architecture of `source`, and its tokenizer."""
    from gpt2_repro.model.load import load_pair, untrained_like

    model, tokenizer = load_pair(source)
    return untrained_like(model, seed=seed), tokenizer


def _setting_of(checkpoint: Checkpoint) -> tuple[str, str]:
    """Return a text that is the same for models that differ only in the seed, and the seed key of a model."""
    record = checkpoint.record
    if not record or not record.environment.run_identity:
        return checkpoint.name, checkpoint.name
    settings = dict(record.environment.run_identity)
    seed = settings.pop("seed", None)
    data_seed = settings.pop("data_seed", None)
    if data_seed is None:
        data_seed = seed
    kind, _, _ = checkpoint.name.partition("(")  # such as checkpoint-100 or final
    setting = json.dumps([kind, record.step, settings], sort_keys=True, default=str)
    return setting, json.dumps([seed, data_seed])


def fingerprint(model: Any, tokenizer: Any) -> str:
    """Return a model's revision: a hash of its weights, configuration and tokenizer with its special tokens."""
    digest = hashlib.sha256()
    config = model.config.to_dict()
    for key in ("_name_or_path", "dtype", "n_ctx"):  # exports have n_ctx, checkpoints do not
        config.pop(key, None)
    digest.update(_json_bytes(config))
    for name, weight in sorted(model.state_dict().items()):
        array = weight.detach().cpu().contiguous().numpy()
        digest.update(f"{name} {array.shape}".encode())
        digest.update(array.data)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend:
        digest.update(backend.to_str().encode())
        ids = []
    else:
        digest.update(_json_bytes(tokenizer.get_vocab()))
        ids = encode(tokenizer, [PROBE])
    # The token before a document, the tokens that are added to all text, and the ids of a tokenizer without a backend.
    added = tokenizer("")["input_ids"]
    roles = [tokenizer.special_tokens_map, start_id(tokenizer), added]
    digest.update(_json_bytes([roles, ids]))
    return digest.hexdigest()


def _json_bytes(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, default=str).encode()


def common_window(models: Sequence[OpenedModel], requested: int, *, explicit: bool) -> int:
    """Return the window (maximum input length) of a comparison in tokens.

    If `requested` is not explicit, the result is at most the shortest training sequence length of the models.

    Raises UserError if `requested` is explicit and a model does not accept inputs of this length.
    """
    shortest = min(models, key=lambda model: model.window)
    smallest = min(models, key=lambda model: model.positions)
    name = shortest.column.name
    window = min(requested, shortest.window)
    most = smallest.positions
    if not explicit:
        if window < requested:
            text = "Window: %d tokens instead of %d, because %s was trained on shorter rows."
            logger.warning(text, window, requested, name)
        return window
    if window < requested:
        logger.warning("Window: %d tokens. %s: positions after %d are untrained.", requested, name, window)
    if requested > most:
        sizes = f"--max_length {requested} is more than the {most} positions of {smallest.column.name}"
        raise UserError(f"{sizes}. Pass --max_length {most} or less.")
    return requested
