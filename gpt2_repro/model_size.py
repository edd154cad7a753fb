"""Arithmetic of a model: parameters, FLOPs per token and bytes of a checkpoint. No torch."""

from typing import NamedTuple


def gpt2_parameters(*, n_layer: int, n_embd: int, n_positions: int, vocab_size: int) -> int:
    """Parameters of a GPT-2 with tied embeddings: 124,439,808 for 12 layers of 768 with 50,257 ids."""
    block = 12 * n_embd**2 + 13 * n_embd
    return vocab_size * n_embd + n_positions * n_embd + n_layer * block + 2 * n_embd


def padded_size(vocab_size: int, multiple: int) -> int:
    """The next multiple: rows of an embedding."""
    return -(-vocab_size // multiple) * multiple


class ModelScale(NamedTuple):
    """A model in numbers: parameters of the true vocabulary and of the padded one that is trained, FLOPs a token.

    `active`: of the true vocabulary, those that work on a token; of a mixture of experts not all do.
    """

    parameters: int
    active: int
    trained: int
    flops_per_token: int
    padded_vocab_size: int


def gpt2_scale(
    *, n_layer: int, n_embd: int, sequence_length: int, vocab_size: int, pad_to_multiple_of: int
) -> ModelScale:
    """Of a model whose rows have `sequence_length` tokens."""
    shape = {"n_layer": n_layer, "n_embd": n_embd, "n_positions": sequence_length}
    padded = padded_size(vocab_size, pad_to_multiple_of)
    trained = gpt2_parameters(**shape, vocab_size=padded)
    multiplying = trained - sequence_length * n_embd
    parameters = gpt2_parameters(**shape, vocab_size=vocab_size)
    flops = flops_per_token(parameters=multiplying, n_layer=n_layer, n_embd=n_embd, sequence_length=sequence_length)
    return ModelScale(parameters, parameters, trained, flops, padded)


def flops_per_token(*, parameters: int, n_layer: int, n_embd: int, sequence_length: int) -> int:
    """Training FLOPs per token: 6N + 12LCT (PaLM, appendix B, as nanoGPT counts them).

    `parameters`: those that multiply a token, so without position embeddings; `n_embd`: of all heads together. 855 MFLOP for
    the 124M model with 50,257 ids. llm.c counts causal attention once, 6N + 6LCT, and all parameters: 803 MFLOP; an MFU
    by its formula is 6 % lower.
    """
    return 6 * parameters + 12 * n_layer * n_embd * sequence_length


def checkpoint_bytes(parameters: int, *, bf16: bool) -> int:
    """Size of a `checkpoint-N` in bytes: fp32 master, m and v, the model twice (engine's and safetensors')."""
    return parameters * (12 + 2 * (2 if bf16 else 4))
