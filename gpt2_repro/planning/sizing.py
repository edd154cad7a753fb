"""Replace sizes of 0 in a recipe with values derived from the data."""

import dataclasses
import logging
import math
import os
from typing import Any

from gpt2_repro.batch_plan import BatchPlan, TokenCount, micro_batches
from gpt2_repro.config import JsonObject
from gpt2_repro.data.prepared import PreparedData
from gpt2_repro.errors import UserError
from gpt2_repro.hardware import Accelerator, find_accelerator, total_memory
from gpt2_repro.manifest import SplitCounts
from gpt2_repro.model.arguments import GPT2, SHAPE, check_model
from gpt2_repro.planning.memory import MemoryTrial
from gpt2_repro.planning.recipe import TrainingRecipe, check_warmup, count_steps, output_dir_of
from gpt2_repro.planning.workload import estimate_memory, plan_run, workload_of
from gpt2_repro.run_record import RunRecord


logger = logging.getLogger(__name__)

# Layers, heads and width. A GPU gets GPT-2 124M. A CPU gets the larger CPU model from 20M training tokens on.
GPU_MODEL, LARGE_CPU_MODEL, CPU_MODEL = (12, 12, 768), (6, 6, 384), (4, 4, 256)
LARGE_TEXT = 20_000_000
# Up to 4 epochs of a text are almost as good as new text (Muennighoff et al. 2023, arXiv:2305.16264).
EPOCHS = 4
MANY_EPOCHS = 10
TOKENS_PER_PARAMETER = 20  # with more tokens, a larger model is better (Hoffmann et al. 2022, arXiv:2203.15556)
STEPS, FEWEST_STEPS = 400, 200
FEWEST_ROWS_PER_STEP, MOST_TOKENS_PER_STEP = 8, 524_288
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
    passed = recipe.typed & {"epochs", "max_steps", "total_tokens"}
    if len(both := sorted(name for name in passed if getattr(recipe.training, name))) > 1:
        raise UserError(f"--{both[0]} and --{both[1]} both set the length of the run. Pass one of them.")
    if passed:  # a length on the command line replaces the length in the recipe
        recipe = recipe.with_training(**{name: 0 for name in {"epochs", "max_steps"} - passed})
    elif recipe.training.epochs and recipe.training.max_steps:
        raise UserError(f"{recipe.path} sets both epochs and max_steps. Remove one of them.")
    epochs, sizes = recipe.training.epochs, [getattr(recipe.model, name) for name in SHAPE]
    sizes += [recipe.training.tokens_per_step, recipe.training.total_tokens]
    try:
        data = data or PreparedData.open(recipe)
    except UserError:
        if epochs or not all(sizes):
            raise
        return _with_micro_batch(_record_size_keys(recipe), device)

    recipe = dataclasses.replace(recipe, data=data.section)
    check_model(recipe.model, packing=recipe.data.packing, separator=recipe.data.separator)
    counts = data.manifest.counts["train"]
    if epochs:
        recipe = recipe.with_training(total_tokens=TokenCount(int(epochs * counts.row_tokens)), epochs=0.0)
    if not all(sizes):
        recipe = _derive(recipe, counts, device or _devices(recipe))
        check_model(recipe.model, packing=recipe.data.packing, separator=recipe.data.separator)
    recipe = _with_micro_batch(_record_size_keys(recipe), device)
    _check_epoch(recipe, counts)
    check_warmup(recipe.training)
    tokens = count_steps(recipe.training) * recipe.training.tokens_per_step
    if (epochs := tokens / max(1, counts.row_tokens)) > MANY_EPOCHS:
        message = "The run reads the text %s times. More than %d epochs often overfit. Pass --epochs %d or prepare more text."
        logger.info(message, f"{epochs:,.0f}", MANY_EPOCHS, EPOCHS)
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
    memory = device.memory_bytes or math.inf  # of an unknown GPU
    if on_cpu := device.kind == "cpu":
        memory = total_memory() / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # which the processes share
    estimate = estimate_memory(recipe, workload_of(recipe), memory, device.count)
    if on_cpu:  # most CPUs compute in fp32
        estimate = estimate._replace(bf16=False, compiled=False)
    estimates = [estimate._replace(sharded=sharded) for sharded in (True, False)]  # with and without DeepSpeed
    sizes = micro_batches(training.tokens_per_step // (recipe.data.sequence_length * device.count))
    trials = (MemoryTrial(size, bool(training.activation_checkpointing)) for size in sizes)
    fitting = (trial.micro_batch for trial in trials if all(each.fits(trial, memory) for each in estimates))
    return recipe.with_training(per_device_train_batch_size=next(fitting, 1))


def _record_size_keys(recipe: TrainingRecipe) -> TrainingRecipe:
    """Add the keys of `size_keys` to --config_overrides.

    A run that has started keeps its own.
    """
    model, saved = recipe.model, RunRecord(output_dir_of(recipe)).environment().run_identity
    keys: dict[str, Any] = {}
    if model.model_type != GPT2:
        from gpt2_repro.model.configuration import size_keys  # imports torch

        keys = size_keys(model, sequence_length=recipe.data.sequence_length)
    if saved.get("model_type") == model.model_type:
        recorded = JsonObject(saved.get("config_overrides", "")).values
        keys |= {key: recorded[key] for key in keys.keys() & recorded.keys()}
    overrides = JsonObject(keys | model.config_overrides.values)
    return dataclasses.replace(recipe, model=dataclasses.replace(model, config_overrides=overrides))


def _check_epoch(recipe: TrainingRecipe, counts: SplitCounts) -> None:
    """Raise UserError if all training rows together are fewer than one step needs."""
    training, processes, option = recipe.training, int(os.environ.get("WORLD_SIZE", "1")), ""
    if micro_batch := min(training.per_device_train_batch_size, counts.rows // processes):
        rows = micro_batch * processes
        most = counts.rows // rows * rows * recipe.data.sequence_length
        if micro_batch < training.per_device_train_batch_size:
            option = f" --per_device_train_batch_size {micro_batch}"
    else:
        raise UserError(f"{processes} processes need more training rows than {counts.rows}. Prepare more text.")
    if training.tokens_per_step > most:
        raise UserError(
            f"{recipe.data.dataset_dir} has only {counts.rows:,} training rows, too few for one step of "
            f"{training.tokens_per_step:,} tokens. Pass at most --tokens_per_step {most}{option}, or prepare more text."
        )


def _derive(recipe: TrainingRecipe, counts: SplitCounts, device: Accelerator) -> TrainingRecipe:
    """Replace each size of 0 in a recipe, as `follow_data` describes."""
    run, on_gpu = RunRecord(output_dir_of(recipe)), device.kind == "cuda"
    stored = run.recipe()
    length, tokens = recipe.data.sequence_length, counts.row_tokens

    def fill(section: str, values: dict[str, Any]) -> Any:
        current, before = getattr(recipe, section), stored.get(section) or {}
        zeros = {name: before.get(name) or value for name, value in values.items() if not getattr(current, name)}
        return dataclasses.replace(current, **zeros)

    shape = GPU_MODEL if on_gpu else LARGE_CPU_MODEL if tokens >= LARGE_TEXT else CPU_MODEL
    model = fill("model", dict(zip(SHAPE, shape, strict=True)))
    parameters = 12 * model.n_layer * model.n_embd**2
    total = recipe.training.total_tokens or min(EPOCHS * tokens, TOKENS_PER_PARAMETER * parameters)
    most_rows = min(MOST_TOKENS_PER_STEP / length, counts.rows)
    target_rows = min(max(total / STEPS / length, FEWEST_ROWS_PER_STEP), most_rows)
    rows = device.count << max(0, int(target_rows / device.count).bit_length() - 1)  # a power of two on each process
    tokens_per_step = fill("training", {"tokens_per_step": TokenCount(rows * length)}).tokens_per_step
    total = TokenCount(max(total, FEWEST_STEPS * tokens_per_step))
    training = fill("training", {"tokens_per_step": tokens_per_step, "total_tokens": total})
    recipe = dataclasses.replace(recipe, model=model, training=training)
    origin = f"as in {run.path}" if stored else f"for a {'GPU' if on_gpu else 'CPU'} and {tokens:,} tokens of text"
    size = f"{model.n_layer} layers of width {model.n_embd}"
    planned = training.max_steps * training.tokens_per_step or training.total_tokens
    logger.info("model %s, %s tokens in total (%.1f epochs), %s", size, f"{planned:,}", planned / tokens, origin)
    return recipe


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
