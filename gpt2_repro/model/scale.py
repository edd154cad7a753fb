"""Compute the parameters and training FLOPs per token of a recipe's model."""

from gpt2_repro.model.arguments import GPT2, ModelArguments
from gpt2_repro.model.size import ModelScale, gpt2_scale


def scale_of(args: ModelArguments, *, sequence_length: int, vocab_size: int) -> ModelScale:
    """Return the parameter count and the FLOPs per token of a recipe's model.

    Raises UserError if the architecture does not accept the keys of --config_overrides.
    """
    if args.model_type == GPT2 and not args.config_overrides.values:
        return gpt2_scale(
            n_layer=args.n_layer,
            n_embd=args.n_embd,
            sequence_length=sequence_length,
            vocab_size=vocab_size,
            pad_to_multiple_of=args.pad_vocab_to_multiple_of,
        )
    from gpt2_repro.model.configuration import build_config, measure_config  # imports torch

    config = build_config(args, sequence_length=sequence_length, vocab_size=vocab_size)
    return measure_config(config)
