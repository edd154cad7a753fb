"""Derive the batch plan of a recipe, and its workload for estimates of time, cost and memory."""

import math
from pathlib import Path

from gpt2_repro.batch_plan import BatchPlan, micro_batches, plan_batches
from gpt2_repro.data.arguments import DataArguments
from gpt2_repro.data.prepared import PreparedData
from gpt2_repro.data.sources.presets import PRESETS, peak_bytes
from gpt2_repro.data.tokenizer import expected_vocab_size
from gpt2_repro.manifest import MANIFEST
from gpt2_repro.model.scale import scale_of
from gpt2_repro.model.size import checkpoint_bytes, state_bytes, tokens_per_chunk
from gpt2_repro.planning.cost import Workload
from gpt2_repro.planning.memory import MemoryEstimate
from gpt2_repro.planning.recipe import TrainingRecipe, TrainingSection, count_steps


# GPT-2 tokens in HellaSwag's 40,168 rows, with padding, in passes of 65,536 positions
# (tests/evaluation/test_hellaswag.py).
HELLASWAG_TOKENS = 3_034_080


def plan_run(training: TrainingSection, data: DataArguments, *, num_processes: int) -> BatchPlan:
    """Return the batch plan of a recipe.

    Raises UserError if the tokens per step do not fit the micro-batch.

    Args:
        num_processes: the world size.
    """
    tokens, length, steps = training.tokens_per_step, data.sequence_length, count_steps(training)
    micro_batch = training.per_device_train_batch_size or micro_batches(tokens // (length * num_processes))[0]
    return plan_batches(tokens, length, micro_batch_size=micro_batch, num_processes=num_processes, max_steps=steps)


def workload_of(recipe: TrainingRecipe) -> Workload:
    """Return the workload of a recipe for estimates of time and cost.

    The data does not have to be prepared.
    """
    data, training = recipe.data, recipe.training
    preset = None if data.data_files else PRESETS.get(data.source)
    is_prepared = Path(data.dataset_dir, MANIFEST).is_file()
    manifest = PreparedData.read(data.dataset_dir).manifest if is_prepared else None
    tokens: float = sum(counts.tokens for counts in manifest.counts.values()) if manifest else 0
    # If the data is not prepared, use the tokens of the source or of the run.
    tokens = tokens or min(data.max_tokens or math.inf, preset.tokens if preset else training.total_tokens)
    share = min(data.validation_tokens, tokens / 10) if data.split == "head" else data.validation_fraction * tokens
    held_out = [int(share)] + [data.validation_tokens] * len(data.validation_sets)
    if manifest:
        held_out = [counts.row_tokens for split, counts in manifest.counts.items() if split != "train"]
    vocabulary = manifest.vocab_size if manifest else expected_vocab_size(data.tokenizer) or 50_257
    scale = scale_of(recipe.model, sequence_length=data.sequence_length, vocab_size=vocabulary)

    steps = count_steps(training)
    steps = min(training.stop_at_step or steps, steps)
    validations = 0 if training.eval_strategy == "no" else _times(steps, training.eval_steps)
    # HellaSwag is scored and samples are written with a validation.
    hellaswag_passes = min(validations, _times(steps, training.hellaswag_steps))
    sampled = training.sample_steps if training.sample_tokens else 0
    saves = 0 if training.save_strategy == "no" else -(-steps // (training.save_steps or steps))
    retained = min(training.keep_checkpoints or saves, max(1, saves))
    retained += steps // training.keep_every_steps if training.keep_every_steps else 0
    # The last save deletes the rolling checkpoint, but not the best one.
    best = bool(training.keep_best_checkpoint and validations and retained < saves)
    rolling = 1 if saves and training.save_rolling_minutes else 0
    state = state_bytes(averaged=training.ema_steps > 0)
    one, final = checkpoint_bytes(scale.trained, bf16=training.is_half, state=state), 4 * scale.parameters
    is_compiled = training.torch_compile is not False and not training.activation_checkpointing
    peak = peak_bytes(staged=2 * tokens, rows=2 * tokens, downloads=preset.downloads if preset else 0)
    return Workload(
        tokens=steps * training.tokens_per_step,
        steps=steps,
        flops=float(steps * training.tokens_per_step * scale.flops_per_token),
        parameters=scale.trained,
        vocab_size=scale.padded_vocab_size,
        # After the first step, the averaged weights are validated too.
        eval_tokens=(2 * validations - 1 if training.ema_steps and validations else validations)
        * sum(min(training.eval_tokens or tokens, tokens) for tokens in held_out),
        hellaswag_tokens=hellaswag_passes * HELLASWAG_TOKENS,
        samples=min(validations, _times(steps, sampled)),
        saves=saves,
        kept=retained + best,
        save_minutes=training.save_minutes if saves else 0.0,
        checkpoint_bytes=one,
        final_bytes=final,
        run_bytes=(retained + rolling + 2) * one + final,
        data_bytes=2 * tokens,
        missing_bytes=0 if is_prepared else peak,
        model_type=recipe.model.model_type,
        # The time of a mixture of experts does not follow from its FLOPs.
        is_fast=training.is_half and is_compiled and scale.active == scale.parameters,
    )


def estimate_memory(recipe: TrainingRecipe, work: Workload, memory_bytes: float | None, cards: int) -> MemoryEstimate:
    """Return the memory estimate for a recipe's model, loss and optimizer.

    The estimate is for the recommended launcher on `cards` GPUs with `memory_bytes` of memory each.
    """
    model, training = recipe.model, recipe.training
    return MemoryEstimate(
        model_type=model.model_type,
        parameters=work.parameters,
        ranks=cards,
        n_layer=model.n_layer,
        n_embd=model.n_embd,
        sequence_length=recipe.data.sequence_length,
        vocab_size=work.vocab_size,
        chunk=tokens_per_chunk(work.vocab_size, memory_bytes or 0),
        bf16=training.is_half,
        compiled=training.torch_compile is not False,
        state_bytes=state_bytes(averaged=training.ema_steps > 0),
    )


def _times(steps: int, every: int) -> int:
    """Return how many times an event happens in `steps` steps.

    The event happens at step 0, every `every` steps, and at the last step. If `every` is 0, it never happens.
    """
    return 1 + -(-steps // every) if every else 0
