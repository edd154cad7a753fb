"""Replace sizes of 0 in a recipe with values derived from the data."""

import dataclasses
import logging
import math
import os
from collections.abc import Mapping
from typing import Any, TypeVar

from gpt2_repro.config import JsonObject
from gpt2_repro.data.prepared import PreparedData
from gpt2_repro.errors import UserError
from gpt2_repro.hardware import Accelerator, find_accelerator, total_memory
from gpt2_repro.manifest import SplitCounts
from gpt2_repro.model.arguments import GPT2, SHAPE, ModelArguments, check_model
from gpt2_repro.planning.batch_plan import micro_batches, plan_run
from gpt2_repro.planning.memory import MemoryTrial
from gpt2_repro.planning.workload import estimate_memory, workload_of
from gpt2_repro.recipe import TrainingRecipe, TrainingSection, check_warmup, count_steps, output_dir_of
from gpt2_repro.run_record import RunRecord
from gpt2_repro.run_record.environment import BatchPlan
from gpt2_repro.tokens import TokenCount


logger = logging.getLogger(__name__)

# A GPU gets GPT-2 124M. A CPU gets the larger CPU model from 20M training tokens on.
GPU_MODEL = {"n_layer": 12, "n_head": 12, "n_embd": 768}
LARGE_CPU_MODEL = {"n_layer": 6, "n_head": 6, "n_embd": 384}
CPU_MODEL = {"n_layer": 4, "n_head": 4, "n_embd": 256}
LARGE_TEXT = 20_000_000
# Up to 4 epochs of a text are almost as good as new text (Muennighoff et al. 2023, arXiv:2305.16264).
EPOCHS = 4
MANY_EPOCHS = 10
TOKENS_PER_PARAMETER = 20  # with more tokens, a larger model is better (Hoffmann et al. 2022, arXiv:2203.15556)
STEPS = 400
FEWEST_STEPS = 200
FEWEST_ROWS_PER_STEP = 8
MOST_TOKENS_PER_STEP = 524_288
S = TypeVar("S", ModelArguments, TrainingSection)
Plans = dict[int, BatchPlan | UserError]  # the batch plan for each number of GPUs, or why the step does not divide


def follow_data(
    recipe: TrainingRecipe, data: PreparedData | None = None, device: Accelerator | None = None
) -> TrainingRecipe:
    """Return a copy of the recipe in which each size of 0 is derived from the data.

    If the run has started before, the sizes are read from the recipe.yaml of the run instead. The exception is a
    micro-batch size of 0, which is derived at every start. The copy has the settings of the prepared folder
    in its section `data:`, and `epochs` is converted to `total_tokens`. `config_overrides` has the keys that make a
    Llama or a Mixtral as large as GPT-2, so that the run records them.

    Args:
        data: the prepared folder. None: open the folder that the recipe names.
        device: the devices of all processes. None: as the device of this process.

    Raises UserError if a size must be derived and no prepared folder matches the recipe, if two of epochs,
    total_tokens and max_steps are passed, or if the data has fewer rows than one step needs.
    """
    recipe = _choose_length(recipe)
    training = recipe.training
    sizes = [getattr(recipe.model, name) for name in SHAPE]
    sizes += [training.tokens_per_step, training.total_tokens]
    try:
        data = data or PreparedData.open(recipe)
    except UserError:
        if training.epochs or not all(sizes):
            raise
        return _with_micro_batch(_record_size_keys(recipe), device)

    recipe = dataclasses.replace(recipe, data=data.section)
    check_model(recipe.model, packing=recipe.data.packing, separator=recipe.data.separator)
    counts = data.manifest.counts["train"]
    if training.epochs:
        total_tokens = TokenCount(int(training.epochs * counts.row_tokens))
        recipe = recipe.with_training(total_tokens=total_tokens, epochs=0.0)
    if not all(sizes):
        recipe = _derive(recipe, counts, device or _devices(recipe))
        check_model(recipe.model, packing=recipe.data.packing, separator=recipe.data.separator)
    recipe = _with_micro_batch(_record_size_keys(recipe), device)
    _check_epoch(recipe, counts)
    check_warmup(recipe.training)
    tokens = count_steps(recipe.training) * recipe.training.tokens_per_step
    epochs = tokens / max(1, counts.row_tokens)
    if epochs > MANY_EPOCHS:
        message = "The run reads the text %s times. More than %d epochs often overfit. Pass --epochs %d or prepare more text."
        logger.info(message, f"{epochs:,.0f}", MANY_EPOCHS, EPOCHS)
    return recipe


def _choose_length(recipe: TrainingRecipe) -> TrainingRecipe:
    """Return the recipe with one length of the run. A length on the command line replaces the one in the file.

    Raises UserError if two lengths are passed, or if the file has both epochs and max_steps.
    """
    passed = recipe.typed & {"epochs", "max_steps", "total_tokens"}
    lengths = sorted(name for name in passed if getattr(recipe.training, name))
    if len(lengths) > 1:
        raise UserError(f"--{lengths[0]} and --{lengths[1]} both set the length of the run. Pass one of them.")
    if not passed:
        if recipe.training.epochs and recipe.training.max_steps:
            raise UserError(f"{recipe.path} sets both epochs and max_steps. Remove one of them.")
        return recipe
    if "epochs" not in passed:
        recipe = recipe.with_training(epochs=0.0)
    if "max_steps" not in passed:
        recipe = recipe.with_training(max_steps=0)
    return recipe


def _devices(recipe: TrainingRecipe) -> Accelerator:
    """Return the devices of all processes of this run."""
    device = find_accelerator(use_cpu=recipe.training.use_cpu)
    return dataclasses.replace(device, count=int(os.environ.get("WORLD_SIZE", "1")))


def _with_micro_batch(recipe: TrainingRecipe, device: Accelerator | None) -> TrainingRecipe:
    """Replace a micro-batch size of 0 by all rows of a step, as far as they fit into the memory.

    A stored value is not used, because it may be for another number of processes.
    """
    training = recipe.training
    if training.per_device_train_batch_size:
        return recipe
    device = device or _devices(recipe)
    if device.kind == "cpu":
        memory: float = total_memory() / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # which the processes share
    else:
        memory = device.memory_bytes or math.inf  # of an unknown GPU
    estimate = estimate_memory(recipe, workload_of(recipe), memory, device.count)
    if device.kind == "cpu":  # most CPUs compute in fp32
        estimate = estimate._replace(bf16=False, compiled=False)
    with_deepspeed = estimate._replace(sharded=True)
    without_deepspeed = estimate._replace(sharded=False)
    rows = training.tokens_per_step // (recipe.data.sequence_length * device.count)
    for micro_batch in micro_batches(rows):
        trial = MemoryTrial(micro_batch, bool(training.activation_checkpointing))
        if with_deepspeed.fits(trial, memory) and without_deepspeed.fits(trial, memory):
            return recipe.with_training(per_device_train_batch_size=micro_batch)
    return recipe.with_training(per_device_train_batch_size=1)


def _record_size_keys(recipe: TrainingRecipe) -> TrainingRecipe:
    """Add the keys of `size_keys` to --config_overrides.

    A run that has started keeps its own.
    """
    model = recipe.model
    keys: dict[str, Any] = {}
    if model.model_type != GPT2:
        from gpt2_repro.model.configuration import size_keys  # imports torch

        keys = size_keys(model, sequence_length=recipe.data.sequence_length)
    saved = RunRecord(output_dir_of(recipe)).environment().run_identity
    if saved.get("model_type") == model.model_type:
        recorded = saved.get("config_overrides", {})
        for key in keys:
            keys[key] = recorded.get(key, keys[key])
    overrides = JsonObject(keys | model.config_overrides.values)
    return dataclasses.replace(recipe, model=dataclasses.replace(model, config_overrides=overrides))


def _check_epoch(recipe: TrainingRecipe, counts: SplitCounts) -> None:
    """Raise UserError if all training rows together are fewer than one step needs."""
    training = recipe.training
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    micro_batch = min(training.per_device_train_batch_size, counts.rows // processes)
    if not micro_batch:
        raise UserError(f"{processes} processes need more training rows than {counts.rows}. Prepare more text.")
    rows = micro_batch * processes
    most = counts.rows // rows * rows * recipe.data.sequence_length
    if training.tokens_per_step > most:
        options = f"--tokens_per_step {most}"
        if micro_batch < training.per_device_train_batch_size:
            options += f" --per_device_train_batch_size {micro_batch}"
        raise UserError(
            f"{recipe.data.dataset_dir} has only {counts.rows:,} training rows, too few for one step of "
            f"{training.tokens_per_step:,} tokens. Pass at most {options}, or prepare more text."
        )


def _derive(recipe: TrainingRecipe, counts: SplitCounts, device: Accelerator) -> TrainingRecipe:
    """Replace each size of 0 in a recipe, as `follow_data` describes."""
    run = RunRecord(output_dir_of(recipe))
    stored = run.recipe()
    length = recipe.data.sequence_length
    tokens = counts.row_tokens
    on_gpu = device.kind == "cuda"

    if on_gpu:
        shape = GPU_MODEL
    else:
        shape = LARGE_CPU_MODEL if tokens >= LARGE_TEXT else CPU_MODEL
    model = _fill(recipe.model, stored.get("model"), shape)

    parameters = 12 * model.n_layer * model.n_embd**2
    total = recipe.training.total_tokens or min(EPOCHS * tokens, TOKENS_PER_PARAMETER * parameters)
    most_rows = min(MOST_TOKENS_PER_STEP / length, counts.rows)
    target_rows = min(max(total / STEPS / length, FEWEST_ROWS_PER_STEP), most_rows)
    rows = device.count << max(0, int(target_rows / device.count).bit_length() - 1)  # a power of two on each process
    training = _fill(recipe.training, stored.get("training"), {"tokens_per_step": TokenCount(rows * length)})
    total = TokenCount(max(total, FEWEST_STEPS * training.tokens_per_step))
    training = _fill(training, stored.get("training"), {"total_tokens": total})

    origin = f"as in {run.path}" if stored else f"for a {'GPU' if on_gpu else 'CPU'} and {tokens:,} tokens of text"
    size = f"{model.n_layer} layers of width {model.n_embd}"
    planned = training.max_steps * training.tokens_per_step or training.total_tokens
    logger.info("model %s, %s tokens in total (%.1f epochs), %s", size, f"{planned:,}", planned / tokens, origin)
    return dataclasses.replace(recipe, model=model, training=training)


def _fill(section: S, stored: Mapping[str, Any] | None, values: Mapping[str, Any]) -> S:
    """Replace each field of a section that is 0: by the stored value of the run, or by `values`."""
    zeros: dict[str, Any] = {}
    for name, value in values.items():
        if not getattr(section, name):
            zeros[name] = (stored or {}).get(name) or value
    return dataclasses.replace(section, **zeros)


def plans_of(recipe: TrainingRecipe, requested: TrainingRecipe, device: Accelerator | None = None) -> Plans:
    """Return the batch plan for 1, 2, 4, 8 and `device.count` devices, or why a step does not divide.

    Args:
        requested: the recipe before sizes of 0 were derived.
    """
    plans: Plans = {}
    recipe = recipe.with_training(per_device_train_batch_size=requested.training.per_device_train_batch_size)
    if not recipe.training.per_device_train_batch_size:
        device = device or _devices(recipe)
    for count in sorted({1, 2, 4, 8, device.count if device else 1}):
        sized = _with_micro_batch(recipe, device and dataclasses.replace(device, count=count))
        try:
            plans[count] = plan_run(sized.training, recipe.data, num_processes=count)
        except UserError as error:
            plans[count] = error
    return plans
