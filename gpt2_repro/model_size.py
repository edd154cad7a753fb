"""Compute parameter counts, FLOPs per token and checkpoint sizes without torch."""

from typing import NamedTuple


def gpt2_parameters(*, n_layer: int, n_embd: int, n_positions: int, vocab_size: int) -> int:
    """Return the number of parameters of a GPT-2 with tied embeddings.

    For example, the result is 124,439,808 for 12 layers, a width (`n_embd`) of 768, 1,024 positions and a vocabulary
    of 50,257.
    """
    block = 12 * n_embd**2 + 13 * n_embd
    return vocab_size * n_embd + n_positions * n_embd + n_layer * block + 2 * n_embd


def padded_size(vocab_size: int, multiple: int) -> int:
    """Return the vocabulary size rounded up to a multiple of `multiple`."""
    return -(-vocab_size // multiple) * multiple


class ModelScale(NamedTuple):
    """The parameters, FLOPs per token and padded vocabulary size of a model.

    Attributes:
        parameters: the number of parameters without vocabulary padding.
        active: how many of these parameters each token uses. It is less than `parameters` only in a mixture of
            experts.
        trained: the number of parameters during training. It includes the vocabulary padding.
        flops_per_token: the training FLOPs per token.
        padded_vocab_size: the vocabulary size during training, including the padding.
    """

    parameters: int
    active: int
    trained: int
    flops_per_token: int
    padded_vocab_size: int


def gpt2_scale(
    *, n_layer: int, n_embd: int, sequence_length: int, vocab_size: int, pad_to_multiple_of: int
) -> ModelScale:
    """Return the size and FLOPs of a GPT-2 for rows with `sequence_length` tokens."""
    shape = {"n_layer": n_layer, "n_embd": n_embd, "n_positions": sequence_length}
    padded = padded_size(vocab_size, pad_to_multiple_of)
    trained = gpt2_parameters(**shape, vocab_size=padded)
    multiplying = trained - sequence_length * n_embd
    parameters = gpt2_parameters(**shape, vocab_size=vocab_size)
    flops = flops_per_token(parameters=multiplying, n_layer=n_layer, n_embd=n_embd, sequence_length=sequence_length)
    return ModelScale(parameters, parameters, trained, flops, padded)


def flops_per_token(*, parameters: int, n_layer: int, n_embd: int, sequence_length: int) -> int:
    """Return the training FLOPs per token: 6N + 12LCT.

    This is the formula of PaLM, appendix B, as used by nanoGPT. N is the number of parameters, L the number of layers,
    C the width and T the sequence length. For the 124M model with a vocabulary of 50,257, the result is 855 MFLOP.

    llm.c uses the formula 6N + 6LCT, in which N includes all parameters and only the causal half of attention counts.
    The result is then 803 MFLOP, so the MFU (model FLOPs utilization) that llm.c reports is 6 % lower.

    Args:
        parameters: the number of parameters without position embeddings, which are not multiplied.
        n_embd: the total width of all attention heads.
    """
    return 6 * parameters + 12 * n_layer * n_embd * sequence_length


def checkpoint_bytes(parameters: int, *, bf16: bool) -> int:
    """Return the size of a `checkpoint-N` in bytes.

    A checkpoint contains the fp32 master weights, the Adam moments m and v in fp32, and two copies of the model: one
    that the training engine writes, and one in safetensors format. Both copies are in bf16 if `bf16` is set, and
    otherwise in fp32.
    """
    return parameters * (12 + 2 * (2 if bf16 else 4))
