"""From a recipe to the work of its run: steps, measurements, bytes. Pure arithmetic."""

from collections.abc import Mapping
from typing import Any

from gpt2_repro.compute import ModelScale, checkpoint_bytes, count_steps
from gpt2_repro.errors import UserError
from gpt2_repro.preflight.cost import Work, times


def work_of(training: Mapping[str, Any], scale: ModelScale, *, validation_tokens: int, hellaswag_tokens: int) -> Work:
    """The work of a recipe.

    Args:
        training: the recipe's section.
        scale: of its model.
        validation_tokens: of the whole split, which a recipe with eval_tokens 0 measures.
        hellaswag_tokens: of one pass over HellaSwag.

    Raises UserError for counts that make no run.
    """
    positive = ("tokens_per_step", "per_device_train_batch_size", "eval_steps", "save_steps")
    not_negative = (
        "stop_at_step",
        "eval_tokens",
        "hellaswag_steps",
        "sample_steps",
        "save_minutes",
        "keep_checkpoints",
    )
    for names, least in ((positive, 1), ((*not_negative, "keep_every_steps"), 0)):
        for name in names:
            if not training[name] >= least:
                raise UserError(f"--{name} {training[name]} must be at least {least}")
    steps = count_steps(training["tokens_per_step"], training["total_tokens"], training["max_steps"])
    steps = min(training["stop_at_step"] or steps, steps)
    tokens = steps * training["tokens_per_step"]
    validations = 0 if training["eval_strategy"] == "no" else times(steps, training["eval_steps"])
    sampled = training["sample_steps"] if training["sample_tokens"] else 0
    return Work(
        tokens=tokens,
        steps=steps,
        flops=float(tokens * scale.flops_per_token),
        eval_tokens=min(training["eval_tokens"] or validation_tokens, validation_tokens),
        validations=validations,
        hellaswag_tokens=hellaswag_tokens,
        # Both come with a validation.
        hellaswag_passes=min(validations, times(steps, training["hellaswag_steps"])),
        samples=min(validations, times(steps, sampled)),
        save_steps=0 if training["save_strategy"] == "no" else training["save_steps"],
        save_minutes=training["save_minutes"],
        checkpoint_bytes=checkpoint_bytes(scale.trained, bf16=training["bf16"]),
        final_bytes=4 * scale.parameters,
        keep_checkpoints=training["keep_checkpoints"],
        keep_every_steps=training["keep_every_steps"],
    )


def is_as_published(training: Mapping[str, Any], *, model_type: str) -> bool:
    """Whether a run computes as the published ones did: a GPT-2 in bf16, compiled, each block once."""
    if model_type != "gpt2":
        return False
    return training["bf16"] and not training["activation_checkpointing"] and training["torch_compile"] is not False
