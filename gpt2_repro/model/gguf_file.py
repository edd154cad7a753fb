"""Write GGUF files, which llama.cpp and the programs that build on it (ollama, LM Studio) read."""

import copy
import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from gpt2_repro.errors import UserError
from gpt2_repro.model.llmc import transposed
from gpt2_repro.tokenization import END_OF_TEXT, without_special_tokens


if TYPE_CHECKING:
    from gguf import GGUFWriter

# llama.cpp divides text by rules that a file selects by name (src/llama-vocab.cpp). A rule is a sequence of regular
# expressions, each of which divides the parts of the one before. The names for tokenizers with and without
# `ignore_merges` differ.
DIGIT = r"\p{N}"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", DIGIT)
RULES = {
    ((GPT2,), False): "gpt-2",
    ((DIGIT, GPT2), False): "smollm",
    ((LLAMA3,), True): "llama-bpe",
    ((LLAMA3,), False): "dbrx",
    ((QWEN2,), False): "qwen2",
}
# Types of tokens.
ORDINARY = 1
SPECIAL = 3  # the id of its text only where a program asks for it
ADDED = 4  # always the id of its text
UNUSED = 5
# No UTF-8 text has these bytes. llama.cpp does not load a BPE without merges.
NO_MERGE = "À Á"


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """The tokenizer of a GGUF file."""

    kind: str  # llama.cpp's algorithm: gpt2 (byte-level BPE) or rwkv (the longest token first)
    rule: str  # llama.cpp's name of the rule that divides text before a BPE is applied
    tokens: list[str]
    types: list[int]
    merges: list[str]
    bos: int | None
    eos: int | None
    add_bos: bool  # whether the tokenizer adds `bos` to a text
    chat_template: str | None


def require_architecture(model: PreTrainedModel) -> None:
    """Raise UserError if llama.cpp would compute something else than a model."""
    config = model.config
    if type(model) is GPT2LMHeadModel:
        # The first one is exact, the others are the approximation that llama.cpp computes.
        if config.activation_function not in ("gelu", "gelu_new", "gelu_pytorch_tanh"):
            raise UserError(f"llama.cpp has no GPT-2 with the activation {config.activation_function}.")
        if not config.scale_attn_weights or config.scale_attn_by_inverse_layer_idx:
            raise UserError("llama.cpp has only GPT-2 with the usual scale of attention.")
    elif type(model) is LlamaForCausalLM:
        if config.hidden_act != "silu" or config.attention_bias or config.mlp_bias:
            raise UserError("Only a Llama with SiLU and without biases can be written as GGUF.")
        rope = config.rope_parameters
        if rope["rope_type"] != "default" or rope.get("partial_rotary_factor", 1.0) != 1.0:
            raise UserError("Only a Llama with the default rotary embeddings can be written as GGUF.")
    else:
        raise UserError(f"Only GPT-2 and Llama can be written as GGUF, not this {type(model).__name__}.")


def read_vocabulary(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> Vocabulary:
    """Return the vocabulary of a GGUF file with `vocab_size` tokens.

    Raises UserError for a tokenizer that llama.cpp would apply in another way.
    """
    if not tokenizer.is_fast:
        raise UserError("A tokenizer without tokenizer.json cannot be written as GGUF.")
    description = json.loads(tokenizer.backend_tokenizer.to_str())
    if max(tokenizer.get_vocab().values()) >= vocab_size:
        raise UserError(f"The tokenizer has more ids than the model, which has {vocab_size:,}.")
    if description["normalizer"] is not None:
        raise UserError("llama.cpp does not normalize text as this tokenizer does.")
    if description["model"]["type"] == "WordLevel":
        return _characters(description, tokenizer, vocab_size)
    return _byte_level_bpe(description, tokenizer, vocab_size)


def _characters(description: dict[str, Any], tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> Vocabulary:
    """Return the vocabulary of `--tokenizer char`.

    llama.cpp's byte-level BPE would end a text at the token 11, because these tokenizers have no end-of-text token. Its
    tokenizer of RWKV has no such token. It never returns for an unknown character if another character begins with the
    same byte, so the characters must be those of ASCII.
    """
    vocabulary = tokenizer.get_vocab()
    is_isolated = _rule_of(_steps_of(description)) == (r"[\s\S]",)
    if not is_isolated or any(len(token) != 1 or not token.isascii() for token in vocabulary):
        raise UserError("Of tokenizers without a BPE, only those of single ASCII characters can be written as GGUF.")
    if len(vocabulary) != vocab_size:  # the name of an unused id would be found in text
        raise UserError(f"The tokenizer has {len(vocabulary):,} characters, but the model has {vocab_size:,} ids.")
    tokens = [""] * vocab_size
    for token, number in vocabulary.items():
        is_plain = token.isprintable() and token != "\\"
        tokens[number] = token if is_plain else f"\\x{ord(token):02x}"
    return Vocabulary(
        kind="rwkv",
        rule="",
        tokens=tokens,
        types=_types(tokenizer, vocab_size),
        merges=[],
        bos=None,
        eos=None,
        add_bos=False,
        chat_template=tokenizer.chat_template,
    )


def _byte_level_bpe(description: dict[str, Any], tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> Vocabulary:
    from tokenizers.pre_tokenizers import ByteLevel

    model = description["model"]
    vocabulary = tokenizer.get_vocab()
    steps = _steps_of(description)
    has_all_bytes = set(ByteLevel.alphabet()) <= vocabulary.keys()
    is_byte_level = has_all_bytes and steps[-1].get("type") == "ByteLevel"
    affixes = model.get("continuing_subword_prefix") or model.get("end_of_word_suffix")
    if model["type"] != "BPE" or not is_byte_level or affixes:
        raise UserError("Only a byte-level BPE, or --tokenizer char, can be written as GGUF.")
    rule = RULES.get((_rule_of(steps), bool(model.get("ignore_merges"))))
    if rule is None:
        raise UserError("llama.cpp has no rule that divides text as this tokenizer does.")
    for token in tokenizer.added_tokens_decoder.values():
        if not token.special and (token.lstrip or token.rstrip or token.single_word):
            raise UserError(f"llama.cpp does not find the added token {token.content!r} in the same places.")
    eos = tokenizer.eos_token_id
    if eos is None:
        eos = vocabulary.get(END_OF_TEXT)
    if eos is None:
        raise UserError("The tokenizer has no end-of-text token, and llama.cpp would take another one for it.")
    bos = tokenizer.bos_token_id
    # The text of a special token must not be the result of merges.
    merges = without_special_tokens(description)["model"]["merges"]
    return Vocabulary(
        kind="gpt2",
        rule=rule,
        tokens=_padded(vocabulary, vocab_size),
        types=_types(tokenizer, vocab_size),
        merges=[" ".join(pair) for pair in merges] or [NO_MERGE],
        bos=eos if bos is None else bos,
        eos=eos,
        add_bos=bos is not None and tokenizer("a")["input_ids"][0] == bos,
        chat_template=tokenizer.chat_template,
    )


def _steps_of(description: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the steps of a tokenizer before its model."""
    first = description["pre_tokenizer"] or {}
    return first.get("pretokenizers", [first])


def _rule_of(steps: list[dict[str, Any]]) -> tuple[str, ...]:
    """Return the regular expressions by which a tokenizer divides text, or none if it divides text otherwise."""
    expressions: list[str] = []
    for step in steps:
        kind = step.get("type")
        if kind == "ByteLevel" and not step["add_prefix_space"]:
            if step.get("use_regex", True):
                expressions.append(GPT2)
        elif kind == "Digits" and step["individual_digits"]:
            expressions.append(DIGIT)
        elif kind == "Split" and step["behavior"] == "Isolated" and not step["invert"]:
            expressions.append(step["pattern"].get("Regex", ""))
        else:
            return ()
    return tuple(expressions)


def _padded(vocabulary: dict[str, int], vocab_size: int) -> list[str]:
    """Return the token of each id. Ids without a token get the names that llama.cpp's own converter gives them."""
    tokens = [f"[PAD{number}]" for number in range(vocab_size)]
    for token, number in vocabulary.items():
        tokens[number] = token
    return tokens


def _types(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> list[int]:
    """Return the type of each id."""
    types = [UNUSED] * vocab_size
    for number in tokenizer.get_vocab().values():
        types[number] = ORDINARY
    for number, token in tokenizer.added_tokens_decoder.items():
        # A special token of one character is text in rows, too.
        is_special = token.special and len(token.content) > 1
        types[number] = SPECIAL if is_special else ADDED
    return types


def write_gguf(model: PreTrainedModel, vocabulary: Vocabulary, path: Path, *, dtype: str) -> None:
    """Write a GPT-2 or Llama with the matrices in `dtype` as a GGUF file.

    Vectors and position embeddings are in fp32, as llama.cpp's converter writes them.
    """
    import gguf

    types = {
        "float32": (gguf.LlamaFileType.ALL_F32, gguf.GGMLQuantizationType.F32),
        "float16": (gguf.LlamaFileType.MOSTLY_F16, gguf.GGMLQuantizationType.F16),
        "bfloat16": (gguf.LlamaFileType.MOSTLY_BF16, gguf.GGMLQuantizationType.BF16),
    }
    file_type, matrix_type = types[dtype]
    config = model.config
    writer = gguf.GGUFWriter(path, config.model_type)
    writer.add_file_type(file_type)
    _add_shape(writer, config)
    _add_vocabulary(writer, vocabulary)
    architecture = {"gpt2": gguf.MODEL_ARCH.GPT2, "llama": gguf.MODEL_ARCH.LLAMA}[config.model_type]
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    for name, tensor in _tensors(model).items():
        kind = matrix_type if _is_matrix(name, tensor) else gguf.GGMLQuantizationType.F32
        values = gguf.quants.quantize(tensor.contiguous().numpy(), kind)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _is_matrix(name: str, tensor: Tensor) -> bool:
    return tensor.ndim == 2 and not name.endswith("wpe.weight")


def _tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the tensors in llama.cpp's layout, with the names of transformers."""
    config = model.config
    weights = dict(model.state_dict())
    if torch.equal(model.get_output_embeddings().weight, model.get_input_embeddings().weight):
        del weights["lm_head.weight"]
    if config.model_type == "gpt2":
        return transposed(weights)
    for name, weight in weights.items():
        if name.endswith("q_proj.weight"):
            weights[name] = _interleaved(weight, config.num_attention_heads)
        elif name.endswith("k_proj.weight"):
            weights[name] = _interleaved(weight, config.num_key_value_heads)
    return weights


def _interleaved(weight: Tensor, heads: int) -> Tensor:
    """Return a projection for rotary embeddings of neighboring dimensions.

    transformers rotates the dimensions i and i + size / 2 of a head together, llama.cpp 2i and 2i + 1.
    """
    width = weight.shape[1]
    return weight.reshape(heads, 2, -1, width).transpose(1, 2).reshape(-1, width)


def _add_shape(writer: "GGUFWriter", config: PreTrainedConfig) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)
    if config.model_type == "gpt2":
        writer.add_feed_forward_length(config.n_inner or 4 * config.n_embd)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
    else:
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
        writer.add_rope_dimension_count(config.head_dim)
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])


def _add_vocabulary(writer: "GGUFWriter", vocabulary: Vocabulary) -> None:
    writer.add_tokenizer_model(vocabulary.kind)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    writer.add_add_bos_token(vocabulary.add_bos)
    if vocabulary.rule:
        writer.add_tokenizer_pre(vocabulary.rule)
    if vocabulary.merges:
        writer.add_token_merges(vocabulary.merges)
    if vocabulary.bos is not None:
        writer.add_bos_token_id(vocabulary.bos)
    if vocabulary.eos is not None:
        writer.add_eos_token_id(vocabulary.eos)
    if vocabulary.chat_template:
        writer.add_chat_template(vocabulary.chat_template)


def rounded(model: PreTrainedModel, dtype: str) -> PreTrainedModel:
    """Return a copy of a model with the weights that a GGUF file has, in fp32.

    Raises UserError if a weight is too large for `dtype`.
    """
    result = copy.deepcopy(model)
    for name, weight in result.named_parameters():
        if _is_matrix(name, weight):
            weight.data = weight.data.to(getattr(torch, dtype)).float()
        if not bool(weight.isfinite().all()):
            raise UserError(f"{name} has values that are too large for {dtype}. Pass --dtype bfloat16.")
    return result


def read_gguf(path: Path, config: PreTrainedConfig) -> PreTrainedModel:
    """Return the model of a GGUF file in fp32, read by transformers."""
    return AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, config=copy.deepcopy(config), dtype=torch.float32
    )
