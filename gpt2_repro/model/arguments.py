"""The recipe section `model:`: the shape of the network and how it computes."""

import dataclasses
import json
from collections.abc import Collection
from typing import Any, Literal

from transformers.hf_argparser import HfArg

from gpt2_repro.checkpoint import resolve_checkpoint
from gpt2_repro.errors import UserError


GPT2 = "gpt2"
# GPT-2's words for a shape, which are the options of every architecture, and transformers' words for it.
SHAPE = {"n_layer": "num_hidden_layers", "n_head": "num_attention_heads", "n_embd": "hidden_size"}


class Overrides(str):
    """Keys of a configuration and their values as JSON, from JSON or from `key=value,key=value` with values of JSON or text."""

    def __new__(cls, text: str) -> "Overrides":
        if not text.strip() or text.lstrip().startswith("{"):
            values = json.loads(text or "{}")
        else:
            pairs = [part.split("=") for part in text.split(",")]
            values = {key.strip(): _value(value.strip()) for key, value in pairs}
        return super().__new__(cls, json.dumps(values, sort_keys=True) if values else "")


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


@dataclasses.dataclass
class ModelArguments:
    """A model by its shape. The defaults are the 124M GPT-2 of the paper as llm.c trains it."""

    model_type: Literal["gpt2", "llama", "mixtral"] = HfArg(default="gpt2", help="model_type in transformers.")
    config_overrides: Overrides = HfArg(
        default=Overrides(""),
        help="More keys of its configuration: a mapping in a recipe, JSON or key=value,… as option.",
    )
    n_layer: int = HfArg(default=12, help="Transformer blocks. 0: by the text and the machine.")
    n_head: int = HfArg(default=12, help="Attention heads in a block. 0: the same.")
    n_embd: int = HfArg(default=768, help="Width of the residual stream. 0: the same.")
    dropout: float = HfArg(default=0.0, help="Of embeddings, attention and residuals; transformers' default is 0.1.")
    pad_vocab_to_multiple_of: int = HfArg(
        default=128, help="Pad the embedding in training: 50,257 becomes 50,304 rows."
    )
    attn_implementation: Literal["auto", "flash_attention_2", "causal_sdpa", "eager"] = HfArg(
        default="auto", help="auto is flash_attention_2 where flash-attn works, else torch's SDPA without a mask."
    )
    document_mask: bool = HfArg(
        default=False,
        help="Keep attention inside a document. Positions stay those of the row. Costs speed without flash_attention_2.",
    )
    init_from: str = HfArg(default="", help="Start from the weights and shape of this folder or Hub id. Empty: fresh.")

    def __post_init__(self) -> None:
        if min(self.n_layer, self.n_head, self.n_embd) < 0 or self.pad_vocab_to_multiple_of < 1:
            raise UserError("--n_layer, --n_head and --n_embd must be at least 0, --pad_vocab_to_multiple_of 1")
        if not 0 <= self.dropout < 1:
            raise UserError(f"--dropout {self.dropout} must be at least 0 and less than 1, such as --dropout 0.1")
        if self.init_from in ("scratch", "resume"):
            raise UserError(
                f"--init_from {self.init_from} is nanoGPT's. Leave it out: a run starts fresh, or resumes."
            )


def check_model(model: ModelArguments, *, packing: str, separator: str) -> None:
    """Raise UserError if the shape is impossible, or if rows do not show the documents that the mask separates."""
    if model.n_head and model.n_embd % model.n_head:
        raise UserError(f"--n_embd {model.n_embd} does not divide by --n_head {model.n_head}")
    if model.document_mask and packing == "wrap":
        raise UserError("with packing wrap a row is of one document: leave out --document_mask")
    if model.document_mask and separator == "none":
        raise UserError("--document_mask needs rows with separators. Prepare the data with --separator before.")


def follow_checkpoint(model: ModelArguments, stated: Collection[str]) -> ModelArguments:
    """Return the section with layers, heads and width of its `init_from`, except for `stated` fields.

    A checkpoint that cannot be read is reported later, when its weights are loaded.
    """
    if not model.init_from:
        return model
    config = _read_config(model.init_from)
    shape = {key: config.get(key, config.get(name)) for key, name in SHAPE.items() if key not in stated}
    return dataclasses.replace(model, **{key: value for key, value in shape.items() if value is not None})


def _read_config(name: str) -> dict[str, Any]:
    """config.json of a checkpoint, a run directory or a Hub id; {} where there is none."""
    from transformers import PretrainedConfig

    try:
        return PretrainedConfig.get_config_dict(resolve_checkpoint(name).source)[0]
    except (UserError, OSError, ValueError):
        return {}
