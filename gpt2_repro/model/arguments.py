"""Define and check the recipe section `model:` (architecture, shape, weights)."""

import dataclasses
import json
from collections.abc import Collection, Mapping
from typing import Any, ClassVar, Literal

from transformers.hf_argparser import HfArg

from gpt2_repro.config import JsonObject
from gpt2_repro.errors import UserError
from gpt2_repro.model.size import gpt2_parameters
from gpt2_repro.run_record.checkpoint import resolve_checkpoint


GPT2 = "gpt2"
# GPT-2's names for the shape, which are the options for every architecture, and transformers' common names.
SHAPE = {"n_layer": "num_hidden_layers", "n_head": "num_attention_heads", "n_embd": "hidden_size"}


@dataclasses.dataclass
class ModelArguments:
    """The recipe section `model:`: architecture, shape, attention and initial weights.

    The defaults are the 124M GPT-2 of the paper, as trained by llm.c.
    """

    _argument_group_name: ClassVar[str] = "section model of the recipe"

    model_type: Literal["gpt2", "llama", "mixtral"] = HfArg(default="gpt2", help="Architecture, as in transformers.")
    config_overrides: JsonObject = HfArg(
        default=JsonObject(""), help="Further keys of the model's configuration: a mapping, JSON or key=value,…"
    )
    n_layer: int = HfArg(default=12, help="Number of transformer blocks. 0: chosen to suit the text and the machine.")
    n_head: int = HfArg(default=12, help="Attention heads per block. 0: chosen to suit the text and the machine.")
    n_embd: int = HfArg(default=768, help="Width of the residual stream. 0: chosen to suit the text and the machine.")
    dropout: float = HfArg(default=0.0, help="Dropout of embeddings, attention and residuals.")
    pad_vocab_to_multiple_of: int = HfArg(default=128, help="Pad the vocabulary to a multiple of this number of ids.")
    attn_implementation: Literal[
        "auto",
        "flash_attention_2",
        "kernels-community/flash-attn2",
        "causal_sdpa",
        "causal_cudnn",
        "causal_efficient",
        "eager",
    ] = HfArg(default="auto", help="Attention kernel. auto: the fastest on this GPU. causal_sdpa: torch's SDPA.")
    document_mask: bool = HfArg(
        default=False, help="No attention between documents of a row. Slower without flash-attn."
    )
    init_from: str = HfArg(default="", help="Folder or Hub id to take weights and shape from. Empty: random weights.")

    def __post_init__(self) -> None:
        if min(self.n_layer, self.n_head, self.n_embd) < 0 or self.pad_vocab_to_multiple_of < 1:
            raise UserError("--n_layer, --n_head, --n_embd must be at least 0, --pad_vocab_to_multiple_of at least 1.")
        if not 0 <= self.dropout < 1:
            raise UserError(f"--dropout {self.dropout} must be at least 0 and less than 1. Example: --dropout 0.1.")


def check_model(model: ModelArguments, *, packing: str, separator: str) -> None:
    """Raise UserError if the model's shape or the document mask is invalid."""
    if model.n_head and model.n_embd % model.n_head:
        heads = next(n for n in range(min(model.n_head, model.n_embd), 0, -1) if model.n_embd % n == 0)
        fix = f"Pass --n_head {heads} or --n_embd {model.n_embd // model.n_head * model.n_head + model.n_head}."
        raise UserError(f"--n_embd {model.n_embd} must be a multiple of --n_head {model.n_head}. {fix}")
    if model.document_mask and packing == "wrap":
        raise UserError(
            "Remove --document_mask. With --packing wrap each row has a single document, so the mask has no effect."
        )
    if model.document_mask and separator == "none":
        raise UserError(
            "--document_mask needs rows with separators. Prepare the data again with `--separator before`."
        )


def size_keys(model: ModelArguments, *, sequence_length: int) -> dict[str, Any]:
    """Return the keys that make a Llama or a Mixtral as large as GPT-2.

    The GPT-2 has the same layers, heads, width and row length. Of a mixture of experts, the parameters that a token
    uses are counted. Keys of --config_overrides replace these keys.
    """
    if model.model_type == GPT2:
        return {}
    width, experts = model.n_embd, 1
    # Attention and two norms per block, one norm after the blocks. The head shares its weights with the embeddings.
    block = 4 * width**2 + 2 * width
    keys: dict[str, Any] = {"tie_word_embeddings": True}
    if model.model_type == "mixtral":
        overrides = model.config_overrides.values
        in_all, experts = (
            value if isinstance(value := overrides.get(key), int) and value > 0 else default
            for key, default in (("num_local_experts", 8), ("num_experts_per_tok", 2))
        )
        block += in_all * width  # the router
        keys |= {"num_key_value_heads": model.n_head}
    gpt2 = gpt2_parameters(n_layer=model.n_layer, n_embd=width, n_positions=sequence_length, vocab_size=0)
    exact = ((gpt2 - width) / model.n_layer - block) / (3 * width * experts)
    # 128 for 2,080: a power of two suits matrix products. Those of experts need strides of 16 bytes (torch 2.13).
    multiple = 1 << max(3, int(exact / 16).bit_length() - 1)
    return keys | {"intermediate_size": max(1, round(exact / multiple)) * multiple}


def recorded_overrides(identity: Mapping[str, Any]) -> dict[str, Any]:
    """Return the --config_overrides of a run, with all keys of `size_keys`.

    Args:
        identity: the result of `run_identity_of` in the run's record.
    """
    # Earlier versions did not record these keys if they had the defaults of transformers.
    apart = {"tie_word_embeddings": False}
    defaults: dict[str, dict[str, Any]] = {
        "llama": apart | {"intermediate_size": 11_008},
        "mixtral": apart | {"intermediate_size": 14_336, "num_key_value_heads": 8},
    }
    recorded = json.loads(identity.get("config_overrides") or "{}")
    return defaults.get(identity.get("model_type", ""), {}) | recorded


def follow_checkpoint(model: ModelArguments, stated: Collection[str]) -> ModelArguments:
    """Return the section `model:` with the shape of `init_from`.

    The shape includes the keys of `size_keys`. Fields that the user set (`stated`) are not changed.
    """
    if not model.init_from:
        return model
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(resolve_checkpoint(model.init_from).source, trust_remote_code=False)
    except Exception:
        return model  # the error is raised later, when the weights are loaded
    kept = {option for option in SHAPE if option in stated and getattr(model, option)}
    shape = {option: getattr(config, name, None) for option, name in SHAPE.items() if option not in kept}
    model = dataclasses.replace(model, **{option: value for option, value in shape.items() if value is not None})
    if config.model_type != model.model_type:
        return model
    keys = {key: getattr(config, key) for key in size_keys(model, sequence_length=1)}
    overrides = JsonObject(json.dumps(keys | model.config_overrides.values))
    return dataclasses.replace(model, config_overrides=overrides)
