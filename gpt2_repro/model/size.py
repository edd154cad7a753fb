"""Compute parameter counts, FLOPs per token and checkpoint sizes without torch."""

from typing import Any, NamedTuple


NO_LIMIT = 1 << 20  # tokens; more than any input here


def max_positions(config: Any) -> int:
    """Return the maximum input length of a model in tokens, or NO_LIMIT.

    Recurrent models such as Mamba, and some models without position embeddings, have no limit.

    Args:
        config: a configuration of transformers, or any object with the entries of a config.json as attributes.
    """
    for name in ("max_position_embeddings", "n_positions", "max_seq_len"):
        limit = getattr(config, name, None)
        if isinstance(limit, int) and limit > 0:
            return limit
    return NO_LIMIT


def experts_of(config: Any) -> tuple[int, int]:
    """Return the number of experts in each block, and of those that a token uses; (0, 0) for a dense model."""
    chosen = getattr(config, "num_experts_per_tok", None) or 0
    for name in ("num_local_experts", "num_experts", "n_routed_experts"):
        experts = getattr(config, name, None)
        if isinstance(experts, int):
            return experts, chosen
    return 0, chosen


def gpt2_parameters(*, n_layer: int, n_embd: int, n_positions: int, vocab_size: int) -> int:
    """Return the number of parameters of a GPT-2 with tied embeddings."""
    block = 12 * n_embd**2 + 13 * n_embd
    return vocab_size * n_embd + n_positions * n_embd + n_layer * block + 2 * n_embd


def padded_size(vocab_size: int, multiple: int) -> int:
    """Return the vocabulary size rounded up to a multiple of `multiple`."""
    return -(-vocab_size // multiple) * multiple


class ModelScale(NamedTuple):
    """The parameters, FLOPs per token and padded vocabulary size of a model.

    Attributes:
        parameters: the number of parameters without vocabulary padding.
        active: the number of parameters that each token uses. In a mixture of experts, this is less than `parameters`.
        trained: the number of parameters with vocabulary padding, as in training.
        flops_per_token: the training FLOPs per token.
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
    padded = padded_size(vocab_size, pad_to_multiple_of)
    trained = gpt2_parameters(n_layer=n_layer, n_embd=n_embd, n_positions=sequence_length, vocab_size=padded)
    parameters = trained - (padded - vocab_size) * n_embd
    multiplied = trained - sequence_length * n_embd  # without position embeddings
    flops = flops_per_token(parameters=multiplied, n_layer=n_layer, n_embd=n_embd, sequence_length=sequence_length)
    return ModelScale(parameters, parameters, trained, flops, padded)


def flops_per_token(*, parameters: int, n_layer: int, n_embd: int, sequence_length: int) -> int:
    """Return the training FLOPs per token: 6N + 12LCT (PaLM, appendix B).

    L is the number of layers, C the total width of the heads of a layer, and T the sequence length.

    Args:
        parameters: N, the number of parameters that are used in matrix products (not the position embeddings).
    """
    # As in nanoGPT: 855 MFLOP for the 124M model. llm.c computes 803 MFLOP (6N + 6LCT: all parameters, and only the
    # causal half of attention), so the MFU (model FLOPs utilization) that llm.c reports is 6 % lower.
    return 6 * parameters + 12 * n_layer * n_embd * sequence_length


def checkpoint_bytes(parameters: int, *, bf16: bool, averaged: bool) -> int:
    """Return the size of a `checkpoint-N` in bytes. `averaged`: with --ema_steps."""
    models = _model_bytes(bf16=bf16, averaged=averaged)
    return parameters * (state_bytes(averaged=averaged) + models)


def _model_bytes(*, bf16: bool, averaged: bool) -> int:
    """Return bytes per parameter of the models in a checkpoint, without the state of the optimizer."""
    # Two copies in bf16 or fp32: one that the training engine writes, and one in safetensors format.
    size = 8
    if bf16:
        size = 4
    # The average has its own file in fp32. The state has it too, but in pickles, and divided among the ranks.
    if averaged:
        size += 4
    return size


def state_bytes(*, averaged: bool) -> int:
    """Return bytes per parameter of master weights, Adam's moments, and the average with --ema_steps."""
    size = 12
    if averaged:
        size += 4
    return size


def tokens_per_chunk(vocab_size: int, memory_bytes: float) -> int:
    """Return the number of tokens whose logits are computed at a time.

    Losses and gradients do not depend on this number, except for rounding errors.

    Args:
        vocab_size: number of ids with padding.
        memory_bytes: memory of the GPU, or 0 for a CPU.
    """
    # With 50,304 ids: 16,384 tokens with 1.6 GB of logits in bf16 on GPUs of 40 GB and more, otherwise 4,096 tokens.
    logits = 2**28
    if memory_bytes >= 40e9:
        logits = 2**30
    tokens = max(1, logits // vocab_size)
    # A power of two, because matrices of other heights leave part of a GPU idle.
    return 1 << (tokens.bit_length() - 1)


def bytes_of_rank(parameters: int, *, bf16: bool, averaged: bool, rank: int, shards: int) -> int:
    """Return the size of the files that a rank writes into a `checkpoint-N`.

    Args:
        averaged: with --ema_steps.
        shards: the number of ranks that DeepSpeed shards the optimizer state over, or 0 without DeepSpeed.
    """
    state_size = state_bytes(averaged=averaged) * parameters  # with the master weights
    if shards:
        part = state_size // shards
        if rank > 0:
            return part
        return part + _model_bytes(bf16=bf16, averaged=averaged) * parameters
    if rank > 0:
        return 0
    average_size = 0
    if averaged:
        average_size = 4 * parameters
    return state_size + average_size
