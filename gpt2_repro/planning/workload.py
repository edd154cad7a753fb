"""Derive the workload of a recipe, for estimates of time, cost and memory."""

import math
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

from gpt2_repro.data.arguments import DataArguments
from gpt2_repro.data.prepared import PreparedData
from gpt2_repro.data.sources.mixture import MixturePart
from gpt2_repro.data.sources.presets import PRESETS, peak_bytes
from gpt2_repro.data.tokenizer import expected_vocab_size
from gpt2_repro.manifest import MANIFEST
from gpt2_repro.model.scale import scale_of
from gpt2_repro.model.size import checkpoint_bytes, state_bytes, tokens_per_chunk
from gpt2_repro.planning.cost import Workload
from gpt2_repro.planning.memory import MemoryEstimate
from gpt2_repro.recipe import TrainingRecipe, TrainingSection, count_steps


# GPT-2 tokens in HellaSwag's 40,168 rows, with padding, in passes of 65,536 positions
# (tests/evaluation/test_hellaswag.py).
HELLASWAG_TOKENS = 3_034_080


class TextSize(NamedTuple):
    """The size of a recipe's text, prepared or expected."""

    tokens: float
    held_out: list[int]  # tokens of each validation set
    vocab_size: int
    missing_bytes: float  # peak of the data preparation, 0 if the data is prepared


def text_size(data: DataArguments, *, expected_tokens: int) -> TextSize:
    """Return the size of a recipe's text. `expected_tokens` counts if nothing is known of the source."""
    if Path(data.dataset_dir, MANIFEST).is_file():
        manifest = PreparedData.read(data.dataset_dir).manifest
        tokens = sum(counts.tokens for counts in manifest.counts.values())
        held_out = [counts.row_tokens for split, counts in manifest.counts.items() if split != "train"]
        return TextSize(tokens, held_out, manifest.vocab_size, missing_bytes=0)
    available, downloads = _expected_source(data)
    available = available or expected_tokens
    if data.max_tokens:
        available = min(available, data.max_tokens)
    if data.split == "head":
        share = min(data.validation_tokens, available / 10)
    else:
        share = data.validation_fraction * available
    held_out = [int(share)] + [data.validation_tokens] * len(data.validation_sets)
    vocab_size = expected_vocab_size(data.tokenizer) or 50_257
    staged = 2 * available
    peak = peak_bytes(staged=staged, rows=staged, downloads=downloads)
    return TextSize(available, held_out, vocab_size, peak)


class SourceSize(NamedTuple):
    """The size of a source that is not prepared."""

    tokens: float  # 0 if unknown
    downloads: float  # maximum disk usage of downloaded files, in bytes


def _expected_source(data: DataArguments) -> SourceSize:
    """Return the size of a named source, or the tokens that a mixture of named sources has before one of them ends."""
    if data.data_files:
        return SourceSize(0, 0)
    totals: list[float] = []
    downloads = 0.0
    for part in data.mixture or [MixturePart(data.source, Fraction(1))]:
        preset = PRESETS.get(part.name)
        if preset is not None:
            totals.append(part.passes * preset.tokens / float(part.share))
            downloads = max(downloads, preset.downloads)
    return SourceSize(min(totals, default=0), downloads)


class Saves(NamedTuple):
    """The checkpoints of a run."""

    planned: int  # that are saved because of `save_steps`
    kept: int  # when the run has ended, with the best one
    at_once: int  # on the disk at the same time: kept, rolling, best, and one that is being written


def count_saves(training: TrainingSection, *, steps: int, validations: int) -> Saves:
    """Return how many checkpoints a run of `steps` steps saves and keeps."""
    if training.save_strategy == "no":
        planned = 0
    else:
        planned = math.ceil(steps / (training.save_steps or steps))
    kept = min(training.keep_checkpoints or planned, max(1, planned))
    if training.keep_every_steps:
        kept += steps // training.keep_every_steps
    at_once = kept + 2
    if planned and training.save_rolling_minutes:
        at_once += 1
    # The last save deletes the rolling checkpoint, but not the best one.
    if training.keep_best_checkpoint and validations and kept < planned:
        kept += 1
    return Saves(planned, kept, at_once)


def workload_of(recipe: TrainingRecipe) -> Workload:
    """Return the workload of a recipe for estimates of time and cost.

    The data does not have to be prepared.
    """
    training = recipe.training
    text = text_size(recipe.data, expected_tokens=training.total_tokens)
    scale = scale_of(recipe.model, sequence_length=recipe.data.sequence_length, vocab_size=text.vocab_size)
    steps = count_steps(training)
    if training.stop_at_step:
        steps = min(steps, training.stop_at_step)

    validations = 0 if training.eval_strategy == "no" else _times(steps, training.eval_steps)
    measured = validations
    if training.ema_steps and validations:
        measured = 2 * validations - 1  # after the first step, the averaged weights are validated too
    tokens_per_validation = sum(min(training.eval_tokens or tokens, tokens) for tokens in text.held_out)
    # HellaSwag is scored and samples are written with a validation.
    hellaswag_passes = min(validations, _times(steps, training.hellaswag_steps))
    samples = min(validations, _times(steps, training.sample_steps)) if training.sample_tokens else 0

    saves = count_saves(training, steps=steps, validations=validations)
    size = checkpoint_bytes(scale.trained, bf16=training.is_half, averaged=training.ema_steps > 0)
    final_size = 4 * scale.parameters
    is_compiled = training.torch_compile is not False and not training.activation_checkpointing
    is_dense = scale.active == scale.parameters  # the time of a mixture of experts does not follow from its FLOPs
    return Workload(
        tokens=steps * training.tokens_per_step,
        steps=steps,
        flops=float(steps * training.tokens_per_step * scale.flops_per_token),
        parameters=scale.trained,
        vocab_size=scale.padded_vocab_size,
        eval_tokens=int(measured * tokens_per_validation),
        hellaswag_tokens=hellaswag_passes * HELLASWAG_TOKENS,
        samples=samples,
        saves=saves.planned,
        kept=saves.kept,
        save_minutes=training.save_minutes if saves.planned else 0.0,
        checkpoint_bytes=size,
        final_bytes=final_size,
        run_bytes=saves.at_once * size + final_size,
        data_bytes=2 * text.tokens,
        missing_bytes=text.missing_bytes,
        model_type=recipe.model.model_type,
        is_fast=training.is_half and is_compiled and is_dense,
    )


def estimate_memory(recipe: TrainingRecipe, work: Workload, memory_bytes: float | None, cards: int) -> MemoryEstimate:
    """Return the memory estimate for a recipe's model, loss and optimizer.

    The estimate is for the recommended launcher on `cards` GPUs with `memory_bytes` of memory each.
    """
    training = recipe.training
    return MemoryEstimate(
        model_type=recipe.model.model_type,
        parameters=work.parameters,
        ranks=cards,
        n_layer=recipe.model.n_layer,
        n_embd=recipe.model.n_embd,
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
    return 1 + math.ceil(steps / every) if every else 0
