"""Define and check the recipe section `model:` (architecture, shape, weights)."""

import dataclasses
from typing import ClassVar, Literal

from gpt2_repro.config import JsonObject
from gpt2_repro.errors import UserError, did_you_mean
from gpt2_repro.fields import ABOVE_0, BELOW_1, changeable, check_ranges, fixed, option


GPT2 = "gpt2"
# GPT-2's names for the shape, which are the options for every architecture, and transformers' common names.
SHAPE = {"n_layer": "num_hidden_layers", "n_head": "num_attention_heads", "n_embd": "hidden_size"}
FlashKernel = Literal["flash_attention_2", "kernels-community/flash-attn2"]
SdpaKernel = Literal["causal_sdpa", "causal_cudnn"]
MlpImplementation = Literal["torch", "cublaslt"]


@dataclasses.dataclass
class ModelArguments:
    """The recipe section `model:`: architecture, shape, attention and initial weights.

    The defaults are the 124M GPT-2 of the paper, as trained by llm.c.
    """

    _argument_group_name: ClassVar[str] = "section model of the recipe"

    model_type: str = fixed(GPT2, "Causal architecture of transformers, for example llama or qwen3.")
    config_overrides: JsonObject = fixed(JsonObject(""), "More configuration keys: a mapping, JSON or key=value,…")
    n_layer: int = fixed(12, "Number of transformer blocks. 0: chosen to suit the text and the machine.", common=True)
    n_head: int = fixed(12, "Attention heads per block. 0: chosen to suit the text and the machine.", common=True)
    n_embd: int = fixed(768, "Width of the residual stream. 0: chosen to suit the text and the machine.", common=True)
    dropout: float = changeable(0.0, "Dropout of embeddings, attention and residuals.", BELOW_1)
    pad_vocab_to_multiple_of: int = fixed(128, "Pad the vocabulary to a multiple of this number.", ABOVE_0)
    attn_implementation: Literal["auto", FlashKernel, SdpaKernel, "packed_cudnn", "eager"] = option(
        "auto", "Attention kernel. auto: the fastest on this GPU. causal_sdpa: torch's SDPA."
    )
    mlp_implementation: MlpImplementation = option(
        "torch", "cublaslt: GELU inside the products of a GPT-2's MLP, with nvmath-python."
    )
    document_mask: bool = fixed(False, "No attention between documents of a row. Slower without flash-attn.")
    init_from: str = fixed("", "Folder, Hub id, or .pt of nanoGPT, to take weights and shape from.", common=True)

    def __post_init__(self) -> None:
        check_ranges(self)


def check_model(model: ModelArguments, *, packing: str, separator: str) -> None:
    """Raise UserError if the architecture, the model's shape or the document mask is invalid."""
    if model.model_type != GPT2:
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as causal

        if model.model_type not in causal:
            fix = did_you_mean(model.model_type, causal)
            raise UserError(f"transformers has no causal architecture {model.model_type!r}. {fix}")
    if model.n_head and model.n_embd % model.n_head:
        raise UserError(f"--n_embd {model.n_embd} must be a multiple of --n_head {model.n_head}.")
    if model.document_mask and packing == "wrap":
        raise UserError("Remove --document_mask. It has no effect with --packing wrap, whose rows have one document.")
    if model.document_mask and separator == "none":
        raise UserError("--document_mask needs separators in the rows. Prepare the data with `--separator before`.")
