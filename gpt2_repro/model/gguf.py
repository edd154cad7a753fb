"""Write GGUF files, which llama.cpp and the programs that build on it (ollama, LM Studio) read."""

import json
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from gpt2_repro.errors import UserError
from gpt2_repro.model.llmc import LAYER_NORM_EPSILON, require_gpt2, transposed


# Types of the file and of its matrices.
DTYPES = {"f16": ("MOSTLY_F16", "F16"), "q8_0": ("MOSTLY_Q8_0", "Q8_0"), "float32": ("ALL_F32", "F32")}


def write_gguf(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, path: Path, *, dtype: str) -> None:
    """Write a GPT-2 and its tokenizer as a GGUF file.

    Raises UserError for other models, for tokenizers that llama.cpp would apply in another way, and if the package
    `gguf` is not installed.

    Args:
        dtype: the type of matrices, a key of DTYPES. Vectors and position embeddings are in fp32, as llama.cpp's
            converter writes them.
    """
    require_gpt2(model, "llama.cpp")
    tokens = _tokens_of(tokenizer, model.config.vocab_size)
    try:
        import gguf
    except ImportError:
        raise UserError("A GGUF file needs the package gguf. Run: pip install gguf") from None
    config, (file_type, matrix_type) = model.config, DTYPES[dtype]
    writer = gguf.GGUFWriter(path, "gpt2")
    writer.add_block_count(config.n_layer)
    writer.add_context_length(config.n_positions)
    writer.add_embedding_length(config.n_embd)
    writer.add_feed_forward_length(4 * config.n_embd)
    writer.add_head_count(config.n_head)
    writer.add_layer_norm_eps(LAYER_NORM_EPSILON)
    writer.add_file_type(gguf.LlamaFileType[file_type])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens["tokens"])
    writer.add_token_types(tokens["types"])
    writer.add_token_merges(tokens["merges"])
    writer.add_add_bos_token(False)
    if (end := tokenizer.eos_token_id) is not None:
        writer.add_bos_token_id(end)
        writer.add_eos_token_id(end)
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)
    targets = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GPT2, config.n_layer)
    for name, tensor in transposed(model.transformer.state_dict()).items():
        array = tensor.contiguous().numpy()
        is_matrix = array.ndim == 2 and name != "wpe.weight" and not (dtype == "q8_0" and array.shape[1] % 32)
        kind = gguf.GGMLQuantizationType[matrix_type if is_matrix else "F32"]
        target = targets.get_name(f"transformer.{name}", try_suffixes=(".weight", ".bias"))
        writer.add_tensor(target, gguf.quants.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tokens_of(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> dict[str, list[Any]]:
    """Return the tokens, their types and the merges of a byte-level BPE.

    The types are 1 (ordinary), 3 (special), 4 (added) and 5 (padding).
    Raises UserError if text is not divided as by GPT-2's tokenizer: llama.cpp knows rules only by their names.
    """
    description = json.loads(tokenizer.backend_tokenizer.to_str()) if tokenizer.is_fast else {}
    model, rule = description.get("model", {}), description.get("pre_tokenizer") or {}
    is_gpt2 = (rule.get("type"), rule.get("add_prefix_space"), rule.get("use_regex")) == ("ByteLevel", False, True)
    if model.get("type") != "BPE" or not is_gpt2 or description["normalizer"] or model.get("ignore_merges"):
        raise UserError("Only a byte-level BPE that divides text as GPT-2's tokenizer does can be written as GGUF.")
    added = {number: 3 if token.special else 4 for number, token in tokenizer.added_tokens_decoder.items()}
    numbers = sorted(tokenizer.get_vocab().items(), key=lambda pair: pair[1])
    if [number for _, number in numbers] != list(range(len(numbers))):
        raise UserError("The ids of the tokenizer have gaps, which GGUF does not allow.")
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    types = [added.get(number, 1) for _, number in numbers]
    padding = range(len(numbers), vocab_size)
    tokens = [*(token for token, _ in numbers), *(f"[PAD{number}]" for number in padding)]
    return {"tokens": tokens, "types": [*types, *(5 for _ in padding)], "merges": merges}
