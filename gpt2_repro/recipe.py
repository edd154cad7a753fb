"""Define the sections `training:` and `evaluation:` of a recipe, and the recipe of train.py.

The defaults of the section `training:` are llm.c's.
"""

import dataclasses
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from gpt2_repro.config import JsonObject, Recipe, parse_recipe
from gpt2_repro.data.arguments import name_folder
from gpt2_repro.data.recipe import DataRecipe
from gpt2_repro.errors import UserError
from gpt2_repro.fields import ABOVE_0, FRACTION, Range, changeable, check_ranges, fixed, option, unnamed
from gpt2_repro.files import expand
from gpt2_repro.model.arguments import SHAPE, ModelArguments, check_model
from gpt2_repro.optim import Schedule
from gpt2_repro.run_record import RunRecord
from gpt2_repro.run_record.layout import Rotation
from gpt2_repro.tokens import TokenCount


# Fields of TrainingArguments that `trainer:` cannot set, by the reason. Nor can it set the fields of the section.
REFUSED_FIELDS = {
    "the files in accelerate_configs/ set it": (
        "deepspeed fsdp fsdp_config parallelism_config accelerator_config local_rank"
    ),
    "it follows from tokens_per_step, total_tokens and the data": (
        "gradient_accumulation_steps num_train_epochs auto_find_batch_size average_tokens_across_devices "
        "dataloader_drop_last dataloader_persistent_workers dataloader_multiprocessing_context "
        "remove_unused_columns label_names length_column_name"
    ),
    "checkpoints have other options (save_*, keep_*, resume_from)": (
        "load_best_model_at_end metric_for_best_model greater_is_better save_total_limit save_only_model "
        "save_on_each_node enable_jit_checkpoint ignore_data_skip resume_from_checkpoint "
        "restore_callback_states_from_checkpoint"
    ),
    "final/ is pushed after the training": (
        "push_to_hub hub_model_id hub_strategy hub_token hub_private_repo hub_always_push hub_revision"
    ),
    "the loss is the plain negative log-likelihood": (
        "label_smoothing_factor neftune_noise_alpha use_liger_kernel liger_kernel_config prediction_loss_only "
        "include_for_metrics batch_eval_metrics eval_accumulation_steps eval_do_concat_batches "
        "eval_use_gather_object include_num_input_tokens_seen debug"
    ),
    "the section training has another field for it": (
        "fp16 fp16_full_eval bf16_full_eval lr_scheduler_kwargs optim_args gradient_checkpointing "
        "gradient_checkpointing_kwargs torch_compile_backend torch_compile_mode do_train do_eval do_predict use_cache"
    ),
}


def why_refused(name: str) -> str | None:
    """Return why `trainer:` cannot set a field of TrainingArguments, or None if it can."""
    if name in TrainingSection.__dataclass_fields__:
        return "it is a field of the section training"
    for reason, names in REFUSED_FIELDS.items():
        if name in names.split():
            return reason
    return None


RATE = Range("above 0 and less than 1", lambda value: 0 < value < 1)
SEED = Range("at least 0 and less than 2**32", lambda value: 0 <= value < 2**32)  # numpy's seeds


def _switch(help: str) -> Any:
    return option(None, help, nargs="?", const=True)


@dataclasses.dataclass
class TrainingSection:
    """The training settings, as written in the recipe and on the command line, or resolved for a machine."""

    _argument_group_name: ClassVar[str] = "section training of the recipe"

    output_dir: str | None = unnamed(
        None, "Run directory. (default: runs/ plus the name of the recipe or data)", common=True
    )
    tokens_per_step: TokenCount = fixed(
        TokenCount(524_288), "Target tokens per step on all devices. 0: derive them.", common=True
    )
    total_tokens: TokenCount = changeable(
        TokenCount(9_890_693_120), "Target tokens of the run. 0: derive them.", common=True
    )
    epochs: float = option(
        0.0, "Passes over the training rows; replaces total_tokens. 0: use total_tokens.", common=True
    )
    max_steps: int = changeable(0, "Optimizer steps, for short tests; replaces total_tokens. 0: use total_tokens.")
    stop_at_step: int = unnamed(0, "Stop with a checkpoint after this step. The schedule stays the same. 0: never.")
    per_device_train_batch_size: int = option(
        64, "Rows per device in one forward pass (micro-batch). 0: derive it.", common=True
    )
    learning_rate: float = changeable(6e-4, "Peak learning rate.", RATE, common=True)
    warmup_steps: float = changeable(700, "Steps of linear warm-up. A value below 1 is a fraction of all steps.")
    lr_scheduler_type: Schedule = changeable("cosine", "Learning-rate schedule after the warm-up.")
    final_learning_rate_fraction: float = changeable(0.0, "Final learning rate, as a fraction of the peak.", FRACTION)
    decay_fraction: float = changeable(0.2, "For warmup_stable_decay: share of steps that decay.", FRACTION)
    optim: str = fixed(
        "adamw_torch_fused",
        "An optimizer of transformers (not schedule_free_*, *lomo, galore_* and apollo_*), or muon (not under ZeRO-3 or "
        "FSDP).",
        common=True,
    )
    muon_momentum: float = fixed(0.95, "Momentum of Muon. Small steps can need less.", FRACTION)
    ema_steps: int = fixed(0, "Also average the weights over about N steps; final/ is the average. 0: never.")
    adam_beta1: float = fixed(0.9, "AdamW's first beta.", FRACTION)
    adam_epsilon: float = fixed(1e-8, "AdamW's epsilon.", ABOVE_0)
    weight_decay: float = fixed(0.1, "Weight decay of matrices and embeddings; biases and norms are not decayed.")
    adam_beta2: float = fixed(0.95, "AdamW's second beta. The default of transformers is 0.999.", FRACTION)
    max_grad_norm: float = changeable(1.0, "Clip gradients to this global norm.")
    bf16: bool = changeable(True, "Compute in bf16, with fp32 master weights. CPUs without bf16 use fp32.")
    precision: Literal["", "auto", "bf16", "fp16", "fp32"] = changeable(
        "",
        "Replaces bf16 if set. auto: bf16 if the device supports it, otherwise fp16 on GPUs and fp32 on CPUs.",
        common=True,
    )
    use_cpu: bool = unnamed(False, "Train on the CPU.")
    accept_any_hardware: bool = unnamed(False, "Use the CPU if no GPU is found, and fp32 if bf16 is not supported.")
    eval_strategy: Literal["steps", "no"] = option("steps", "steps: validate every eval_steps steps. no: never.")
    eval_steps: int = option(250, "Validate after each N steps, besides the start and the end. 0: never validate.")
    eval_on_start: bool = option(True, "Validate before the first step.")
    eval_tokens: TokenCount = option(TokenCount(10_485_760), "Tokens per validation. 0: the complete split.")
    per_device_eval_batch_size: int = option(64, "Rows per device in one validation pass.", ABOVE_0)
    hellaswag_steps: int = option(0, "Score HellaSwag every N steps, with the next validation. 0: never.")
    hellaswag_data: str = unnamed("Rowan/hellaswag", "HellaSwag's validation split: a Hub id or a .jsonl(.gz) file.")
    sample_steps: int = option(1000, "Sample text every N steps, with the next validation. 0: never.")
    sample_tokens: int = option(64, "Tokens per text sample. 0: no samples.")
    sample_prompt: str = option("", "Prompt of the text samples. Empty: begin a new document.")
    logging_steps: int = unnamed(10, "Steps between log lines with training metrics.", ABOVE_0)
    profile_step: int = unnamed(0, "Profile this optimizer step: RUN/profile-N.json.gz, for Perfetto. 0: none.")
    save_strategy: Literal["steps", "no"] = unnamed("steps", "steps: save at intervals. no: only at an early stop.")
    save_steps: int = unnamed(2000, "Steps between checkpoints. 0: save after save_minutes and at the end.")
    save_minutes: float = unnamed(15.0, "Save if the last checkpoint is N minutes old. 0: save by save_steps only.")
    save_rolling_minutes: float = unnamed(2.0, "Also save every N minutes, and replace the last such save. 0: never.")
    background_save: bool = unnamed(True, "Train while a checkpoint is written from a copy in host memory.")
    keep_checkpoints: int = unnamed(2, "Number of newest complete checkpoints to keep. 0 keeps all.")
    keep_best_checkpoint: bool = unnamed(True, "Also keep the checkpoint with the lowest validation loss at its step.")
    keep_every_steps: int = unnamed(0, "Never delete checkpoints whose step is a multiple of N. 0: no effect.")
    sync_to: str = unnamed("", "Copy each save here: a folder, s3://…, hf://buckets/…, other URLs.", common=True)
    sync_from: str = unnamed("", "Restore the run from here on an empty machine. (default: sync_to)")
    resume_from: str = unnamed("", "Resume from this checkpoint, such as checkpoint-1000. Empty: the newest.")
    allow_resume_change: bool = unnamed(False, "Resume even if the data, schedule, dropout or seed changed.")
    max_hours: float = unnamed(
        0.0, "Save a checkpoint and stop after N hours in all attempts together. 0: no limit.", common=True
    )
    max_usd: float = unnamed(
        0.0, "Save a checkpoint and stop at a cost of N dollars (see usd_per_hour). 0: no limit.", common=True
    )
    usd_per_hour: float = unnamed(0.0, "Dollars per hour for the machine. 0: the list price of its GPUs, if known.")
    hang_timeout: float = unnamed(600.0, "End all ranks with stack traces after N seconds without progress. 0: never.")
    seed: int = changeable(42, "Seed of the weights and of the order of rows.", SEED, common=True)
    data_seed: int | None = changeable(None, "Seed of the order of rows. (default: seed)", SEED)
    train_sampling_strategy: Literal["random", "sequential"] = changeable("random", "Order of the rows.")
    dataloader_num_workers: int | None = unnamed(
        None, "Processes per device that load rows in advance. (default: 2 on GPUs, 0 on CPUs)"
    )
    torch_compile: bool | None = _switch("Compile the loss and its gradient. (default: true on GPUs)")
    activation_checkpointing: bool | None = _switch("Recompute each block in the backward pass to save memory.")
    report_to: list[str] = unnamed(
        [], "Tracking services, such as wandb, tensorboard, trackio or mlflow.", common=True
    )
    run_name: str | None = unnamed(None, "Name for tracking services. (default: the recipe and its overrides)")
    disable_tqdm: bool = unnamed(False, "Print no progress bar.")
    trainer: JsonObject = option(JsonObject(""), "More fields of TrainingArguments: a mapping, JSON or key=value,…")

    @property
    def asked_precision(self) -> str:
        """The precision of the recipe: "auto", "bf16", "fp16" or "fp32"."""
        return self.precision or ("bf16" if self.bf16 else "fp32")

    @property
    def is_half(self) -> bool:
        """Whether matrix products have 16 bits (`auto` counts as 16 bits)."""
        return self.asked_precision != "fp32"

    @property
    def rotation(self) -> Rotation:
        """Which checkpoints the run keeps."""
        return Rotation(self.keep_checkpoints, self.keep_every_steps, self.keep_best_checkpoint)

    @property
    def last_step(self) -> int:
        """The last optimizer step: max_steps, or stop_at_step if set and earlier."""
        return min(self.stop_at_step or self.max_steps, self.max_steps)

    def __post_init__(self) -> None:
        """Raise UserError if a value is out of its range."""
        check_ranges(self)
        if not self.eval_steps:
            self.eval_strategy = "no"
        for name in self.trainer.values:
            reason = why_refused(name)
            if reason:
                raise UserError(f"trainer cannot set {name}: {reason}.")


# The tasks of each suite of evaluate.sh.
SUITES = {
    "quick": ["lambada_openai", "hellaswag", "wikitext"],
    "standard": ["lambada_openai", "hellaswag", "piqa", "arc_easy", "sciq", "blimp", "wikitext"],
    "core": [],  # the tasks of DCLM's evaluation bundle (evaluation/core.py)
}


@dataclasses.dataclass
class EvaluationArguments:
    """The recipe section `evaluation:`: which tasks, baseline and window to use."""

    _argument_group_name: ClassVar[str] = "section evaluation of the recipe"

    tasks: list[str] = unnamed(
        SUITES["quick"],
        "lm-eval tasks to score. last_word and document_perplexity use the run's validation documents.",
    )
    baseline: str = unnamed(
        "openai-community/gpt2",
        "Model to compare with: Hub id, folder, untrained (the same model with random weights) or none.",
    )
    max_length: int = unnamed(1024, "Window in tokens. By default at most the length of the training rows.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationRecipe(Recipe):
    """A recipe of which only the section `evaluation:` is read."""

    evaluation: EvaluationArguments


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingRecipe(DataRecipe):
    """A recipe for train.py."""

    model: ModelArguments
    training: TrainingSection
    evaluation: EvaluationArguments

    def with_training(self, **values: Any) -> "TrainingRecipe":
        """Return a copy with other values in the section training."""
        return dataclasses.replace(self, training=dataclasses.replace(self.training, **values))


def load_recipe(argv: Sequence[str], **parsing: Any) -> TrainingRecipe:
    """Return the recipe for a command line of train.py.

    If `init_from` names a checkpoint, the model sizes are the sizes of that checkpoint. A run that has started can
    resume without it.

    Args:
        argv: the command line after the program's name.
        parsing: additional keyword arguments for `config.parse_recipe`.

    Raises UserError for mistakes that can be found without reading the data or checking the hardware.
    """
    recipe = parse_recipe(TrainingRecipe, argv, **parsing)
    check_warmup(recipe.training)
    recipe = dataclasses.replace(recipe, data=name_folder(recipe.data, recipe.typed))
    if recipe.model.init_from:
        recipe = dataclasses.replace(recipe, model=_model_of_checkpoint(recipe))
    check_model(recipe.model, packing=recipe.data.packing, separator=recipe.data.separator)
    return recipe


def _model_of_checkpoint(recipe: TrainingRecipe) -> ModelArguments:
    """Return the section `model:` with the shape of `init_from`, or of the run if it has started."""
    from gpt2_repro.model.initial_weights import follow_checkpoint  # imports torch

    stated = [name for name in SHAPE if recipe.is_stated(name)]
    model = follow_checkpoint(recipe.model, stated)
    if model is not recipe.model:
        return model
    # It cannot be read, perhaps on another machine. A run that has started knows its shape.
    run_identity = RunRecord(output_dir_of(recipe)).environment().run_identity
    shape = {name: run_identity[name] for name in SHAPE if name not in stated and name in run_identity}
    return dataclasses.replace(model, **shape)


def check_trackers(report_to: Sequence[str]) -> None:
    """Raise UserError if the package of a common tracking service is missing, without importing anything."""
    for name in {"wandb", "trackio", "tensorboard"} & set(report_to):
        packages = [name, f"{name}X"]  # transformers also accepts tensorboardX
        if not any(importlib.util.find_spec(package) for package in packages):
            raise UserError(f"Cannot report to {name!r} (--report_to). Run `pip install {name}`.")


def count_steps(training: TrainingSection) -> int:
    """Return the number of optimizer steps of a run.

    Raises UserError if the run has fewer tokens than one step.
    """
    steps = training.max_steps or training.total_tokens // training.tokens_per_step
    if steps < 1:
        short = f"--total_tokens {training.total_tokens} is less than the tokens of one step"
        raise UserError(f"{short}. Pass at least --total_tokens {training.tokens_per_step}.")
    return steps


def check_warmup(training: TrainingSection) -> None:
    """Raise UserError if the warm-up is not shorter than the run."""
    if training.epochs or not (training.tokens_per_step and (training.max_steps or training.total_tokens)):
        return  # the number of steps is not known yet
    steps = count_steps(training)
    if training.warmup_steps >= max(1, steps):
        problem = f"--warmup_steps {training.warmup_steps:g} must be less than the {steps:,} steps of the run"
        raise UserError(f"{problem}. Pass fewer, such as --warmup_steps {steps // 10}.")


def output_dir_of(recipe: TrainingRecipe) -> str:
    """Return --output_dir, or runs/NAME if --output_dir is not set.

    NAME is the name of the recipe file. If --dataset_dir was passed and differs from the folder in the recipe file,
    NAME is the name of the passed folder.
    """
    if recipe.training.output_dir:
        return expand(recipe.training.output_dir)
    folder = Path(recipe.data.dataset_dir).name
    folder_in_file = Path(recipe.written.get("data", {}).get("dataset_dir", "")).name
    name = recipe.path.stem if folder in ("", folder_in_file) else folder
    return f"runs/{name}"
