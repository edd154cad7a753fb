"""Define the recipe section `training:`, with llm.c's defaults."""

import dataclasses
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from gpt2_repro.batch_plan import BatchPlan, SamplingStrategy, TokenCount
from gpt2_repro.checkpoints.resuming import RunIdentity
from gpt2_repro.config import JsonObject, Recipe, parse_recipe
from gpt2_repro.data.arguments import DataArguments, name_folder
from gpt2_repro.errors import UserError
from gpt2_repro.evaluation.arguments import EvaluationArguments
from gpt2_repro.files import expand
from gpt2_repro.manifest import Manifest
from gpt2_repro.model.arguments import ModelArguments, check_model
from gpt2_repro.optim import Schedule


# Fields of TrainingArguments that this project derives. `trainer:` cannot set them, nor the fields of the section.
DERIVED = {
    "the files in accelerate_configs/ set it": "deepspeed fsdp fsdp_config parallelism_config accelerator_config "
    "local_rank",
    "it follows from tokens_per_step, total_tokens and the data": "gradient_accumulation_steps num_train_epochs "
    "auto_find_batch_size average_tokens_across_devices dataloader_drop_last dataloader_persistent_workers "
    "dataloader_multiprocessing_context remove_unused_columns label_names length_column_name",
    "checkpoints have other options (save_*, keep_*, resume_from)": "load_best_model_at_end metric_for_best_model "
    "greater_is_better save_total_limit save_only_model save_on_each_node enable_jit_checkpoint ignore_data_skip "
    "resume_from_checkpoint restore_callback_states_from_checkpoint",
    "final/ is pushed after the training": "push_to_hub hub_model_id hub_strategy hub_token hub_private_repo "
    "hub_always_push hub_revision",
    "the loss is the plain negative log-likelihood": "label_smoothing_factor neftune_noise_alpha use_liger_kernel "
    "liger_kernel_config prediction_loss_only include_for_metrics batch_eval_metrics eval_accumulation_steps "
    "eval_do_concat_batches eval_use_gather_object include_num_input_tokens_seen debug",
    "the section training has another field for it": "fp16 fp16_full_eval bf16_full_eval lr_scheduler_kwargs optim_args "
    "gradient_checkpointing gradient_checkpointing_kwargs torch_compile_backend torch_compile_mode do_train do_eval "
    "do_predict use_cache",
}
# Valid ranges. Checks that need several options or the machine are in other functions.
AT_LEAST_0 = (
    *("tokens_per_step", "total_tokens", "epochs", "max_steps", "stop_at_step", "eval_steps", "ema_steps"),
    *("per_device_train_batch_size", "max_grad_norm", "skip_loss_z", "skip_grad_z", "warmup_steps", "max_usd"),
    *("hellaswag_steps", "sample_steps", "sample_tokens", "save_steps", "save_minutes", "keep_checkpoints"),
    *("save_rolling_minutes", "keep_every_steps", "max_hours", "usd_per_hour", "hang_timeout", "weight_decay", "seed"),
)
ABOVE_0 = ("adam_epsilon", "per_device_eval_batch_size", "logging_steps", "learning_rate")
SCHEDULE = ("learning_rate", "warmup_steps", "final_learning_rate_fraction", "lr_scheduler_type", "decay_fraction")
OPTIMIZER = ("optim", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "muon_momentum", "ema_steps")
ORDER = ("seed", "data_seed", "train_sampling_strategy", "skip_loss_z", "skip_grad_z")
TRAJECTORY = (*SCHEDULE, *OPTIMIZER, "max_grad_norm", *ORDER, "precision")  # fields of the section that change a run
# Fields that --allow_resume_change may override (bf16: not under DeepSpeed). The other fields determine the shapes or
# the optimizer state of the checkpoint. tokens_per_step determines the position in the data, which is counted in
# steps.
CHANGEABLE = {*SCHEDULE, *ORDER, "max_grad_norm", "data", "max_steps", "bf16", "precision", "dropout"}
FRACTIONS = ("final_learning_rate_fraction", "decay_fraction", "adam_beta1", "adam_beta2", "muon_momentum")


def _field(default: Any, help: str, **parsing: Any) -> Any:
    return dataclasses.field(default=default, metadata={"help": help} | parsing)


def _switch(help: str) -> Any:
    return _field(None, help, nargs="?", const=True)


@dataclasses.dataclass
class TrainingSection:
    """The training settings, as written in the recipe and on the command line."""

    _argument_group_name: ClassVar[str] = "section training of the recipe"

    output_dir: str | None = _field(None, "Run directory. (default: runs/ plus the name of the recipe or data folder)")
    tokens_per_step: TokenCount = _field(
        TokenCount(524_288), "Target tokens per optimizer step on all devices together. 0: derive it from the text."
    )
    total_tokens: TokenCount = _field(
        TokenCount(9_890_693_120), "Target tokens of the run. 0: derive it from the text, usually 4 epochs or fewer."
    )
    epochs: float = _field(0.0, "Passes over the training rows; replaces total_tokens. 0: use total_tokens.")
    max_steps: int = _field(0, "Optimizer steps, for short tests; replaces total_tokens. 0: use total_tokens.")
    stop_at_step: int = _field(0, "Save a checkpoint and stop after this step. The schedule stays the same. 0: never.")
    per_device_train_batch_size: int = _field(
        64, "Rows per device in one forward pass (micro-batch). 0: derive it from tokens_per_step and the memory."
    )
    learning_rate: float = _field(6e-4, "Peak learning rate.")
    warmup_steps: float = _field(700, "Steps of linear warm-up. A value below 1 is a fraction of all steps.")
    lr_scheduler_type: Schedule = _field("cosine", "Learning-rate schedule after the warm-up.")
    final_learning_rate_fraction: float = _field(0.0, "Final learning rate, as a fraction of the peak.")
    decay_fraction: float = _field(0.2, "For warmup_stable_decay: fraction of steps at the end with a falling rate.")
    optim: str = _field("adamw_torch_fused", "An optimizer of transformers, or muon (not under ZeRO-3 or FSDP).")
    muon_momentum: float = _field(0.95, "Momentum of Muon. Small steps can need less.")
    ema_steps: int = _field(0, "Also average the weights over about N steps; final/ is the average. 0: never.")
    adam_beta1: float = _field(0.9, "AdamW's first beta.")
    adam_epsilon: float = _field(1e-8, "AdamW's epsilon.")
    weight_decay: float = _field(0.1, "Weight decay of matrices and embeddings; biases and norms are not decayed.")
    adam_beta2: float = _field(0.95, "AdamW's second beta. The default of transformers is 0.999.")
    max_grad_norm: float = _field(1.0, "Clip gradients to this global norm.")
    bf16: bool = _field(True, "Compute in bf16, with fp32 master weights. CPUs without bf16 instructions use fp32.")
    precision: Literal["", "auto", "bf16", "fp16", "fp32"] = _field(
        "", "Replaces bf16 if set. auto: bf16 if the device supports it, otherwise fp16 on GPUs and fp32 on CPUs."
    )
    use_cpu: bool = _field(False, "Train on the CPU.")
    accept_any_hardware: bool = _field(False, "Use the CPU if no GPU is found, and fp32 if bf16 is not supported.")
    eval_strategy: Literal["steps", "no"] = _field("steps", "steps: validate every eval_steps steps. no: never.")
    eval_steps: int = _field(250, "Steps between validations, besides those at the start and the end. 0: never.")
    eval_on_start: bool = _field(True, "Validate before the first step.")
    eval_tokens: TokenCount = _field(TokenCount(10_485_760), "Tokens per validation. 0: the complete split.")
    per_device_eval_batch_size: int = _field(64, "Rows per device in one validation pass.")
    hellaswag_steps: int = _field(0, "Score HellaSwag every N steps, with the next validation. 0: never.")
    hellaswag_data: str = _field("Rowan/hellaswag", "HellaSwag's validation split: a Hub id or a .jsonl(.gz) file.")
    sample_steps: int = _field(1000, "Sample text every N steps, with the next validation. 0: never.")
    sample_tokens: int = _field(64, "Tokens per text sample. 0: no samples.")
    sample_prompt: str = _field("", "Prompt of the text samples. Empty: begin a new document.")
    logging_steps: int = _field(10, "Steps between log lines with training metrics.")
    save_strategy: Literal["steps", "no"] = _field("steps", "steps: save at intervals. no: only at an early stop.")
    save_steps: int = _field(2000, "Steps between checkpoints. 0: save after save_minutes and at the end.")
    save_minutes: float = _field(15.0, "Save if the last checkpoint is N minutes old. 0: save by save_steps only.")
    save_rolling_minutes: float = _field(2.0, "Also save every N minutes, and replace the last such save. 0: never.")
    background_save: bool = _field(True, "Train while a checkpoint is written from a copy in host memory.")
    keep_checkpoints: int = _field(2, "Number of newest complete checkpoints to keep. 0 keeps all.")
    keep_best_checkpoint: bool = _field(True, "Also keep the checkpoint with the lowest validation loss at its step.")
    keep_every_steps: int = _field(0, "Never delete checkpoints whose step is a multiple of N. 0: no effect.")
    sync_to: str = _field(
        "", "Copy the run here after each save: a folder, HOST:PATH (SFTP), s3://…, hf://buckets/… or another URL."
    )
    sync_from: str = _field("", "Restore the run from here on an empty machine. (default: sync_to)")
    resume_from: str = _field("", "Resume from this checkpoint, such as checkpoint-1000. Empty: the newest.")
    allow_resume_change: bool = _field(False, "Resume even if the data, schedule, dropout or seed changed.")
    extend_to: TokenCount = _field(TokenCount(0), "Extend the run to N target tokens, with a new warm-up. 0: never.")
    max_hours: float = _field(0.0, "Save a checkpoint and stop after N hours in all attempts together. 0: no limit.")
    max_usd: float = _field(0.0, "Save a checkpoint and stop at a cost of N dollars (see usd_per_hour). 0: no limit.")
    usd_per_hour: float = _field(0.0, "Dollars per hour for the machine. 0: the list price of its GPUs, if known.")
    hang_timeout: float = _field(600.0, "End all ranks with stack traces after N seconds without progress. 0: never.")
    skip_loss_z: float = _field(
        0.0, "Skip an update if its loss is N standard deviations above the mean of the last 128 losses. 0: never."
    )
    skip_grad_z: float = _field(0.0, "Apply the rule of --skip_loss_z to the gradient norm before clipping. 0: never.")
    seed: int = _field(42, "Seed of the weights and of the order of rows.")
    data_seed: int | None = _field(None, "Seed of the order of rows. (default: seed)")
    train_sampling_strategy: SamplingStrategy = _field("random", "Order of rows. group_by_length needs packing wrap.")
    dataloader_num_workers: int = _field(2, "Processes per device that load rows in advance.")
    torch_compile: bool | None = _switch("Compile the loss and its gradient. (default: true on GPUs)")
    activation_checkpointing: bool | None = _switch("Recompute each block in the backward pass to save memory.")
    report_to: list[str] = dataclasses.field(
        default_factory=list, metadata={"help": "Tracking services, such as wandb, tensorboard, trackio or mlflow."}
    )
    run_name: str | None = _field(None, "Name for tracking services. (default: the recipe and its overrides)")
    disable_tqdm: bool = _field(False, "Print no progress bar.")
    trainer: JsonObject = _field(
        JsonObject(""),
        "Other fields of transformers.TrainingArguments. In a recipe: a mapping. On the command line: JSON or key=value,…",
    )

    @property
    def asked_precision(self) -> str:
        """The precision of the recipe: "auto", "bf16", "fp16" or "fp32"."""
        return self.precision or ("bf16" if self.bf16 else "fp32")

    @property
    def is_half(self) -> bool:
        """Whether matrix products have 16 bits (`auto` counts as 16 bits)."""
        return self.asked_precision != "fp32"

    def __post_init__(self) -> None:
        """Raise UserError if a value is out of its range."""
        tests = {"at least 0": AT_LEAST_0, "above 0": ABOVE_0, "from 0 to 1": FRACTIONS}
        for text, names in tests.items():
            for name in names:
                value = getattr(self, name)
                # Infinity and NaN fail each test.
                if not (value > 0 if names is ABOVE_0 else 0 <= value <= (1 if names is FRACTIONS else 1e18)):
                    raise UserError(f"--{name} {value} must be {text}.")
        for name, limit in (("learning_rate", 1), ("seed", 2**32)):  # numpy's seeds
            if getattr(self, name) >= limit:
                raise UserError(f"--{name} {getattr(self, name)} must be less than {limit}.")
        if not self.eval_steps:
            self.eval_strategy = "no"
        reasons = {name: reason for reason, names in DERIVED.items() for name in names.split()}
        reasons |= dict.fromkeys(self.__dataclass_fields__, "it is a field of the section training")
        for name in self.trainer.values:
            if name in reasons:
                raise UserError(f"trainer cannot set {name}: {reasons[name]}.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingRecipe(Recipe):
    """A recipe for train.py."""

    data: DataArguments
    model: ModelArguments
    training: TrainingSection
    evaluation: EvaluationArguments

    def with_training(self, **values: Any) -> "TrainingRecipe":
        """Return a copy with other values in the section training."""
        return dataclasses.replace(self, training=dataclasses.replace(self.training, **values))


def load_recipe(argv: Sequence[str], **parsing: Any) -> TrainingRecipe:
    """Return the recipe for a command line of train.py.

    If `init_from` names a checkpoint, the model sizes are the sizes of that checkpoint.

    Args:
        argv: the command line after the program's name.
        parsing: additional keyword arguments for `recipe.parse_recipe`.

    Raises UserError for mistakes that can be found without reading the data or checking the hardware.
    """
    recipe = parse_recipe(TrainingRecipe, argv, **parsing)
    check_warmup(recipe.training)
    data, model = name_folder(recipe.data, recipe.typed), recipe.model
    if model.init_from:
        from gpt2_repro.model.initial_weights import follow_checkpoint  # imports torch

        model = follow_checkpoint(model, recipe.stated)
    check_model(model, packing=recipe.data.packing, separator=recipe.data.separator)
    return dataclasses.replace(recipe, data=data, model=model)


def check_trackers(report_to: Sequence[str]) -> None:
    """Raise UserError if the package of a common tracking service is missing, without importing anything."""
    for name in {"wandb", "trackio", "tensorboard"} & set(report_to):
        if not any(map(importlib.util.find_spec, (name, f"{name}X"))):  # transformers also accepts tensorboardX
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


def run_identity_of(
    settings: TrainingSection, plan: BatchPlan, *, data: Manifest, model: Mapping[str, Any]
) -> RunIdentity:
    """Return the settings of a run that must not change on a resume.

    Args:
        model: the section `model:` of the recipe.
    """
    values = {
        "data": data.sha256["train"],
        "tokenizer": data.tokenizer_sha256,
        "sequence_length": plan.sequence_length,
        "tokens_per_step": plan.tokens_per_step,
        "max_steps": plan.max_steps,
        "bf16": settings.bf16,
        **{key: value for key, value in model.items() if key != "attn_implementation"},
        **{name: getattr(settings, name) for name in TRAJECTORY},
    }
    return RunIdentity(values, CHANGEABLE, settings.allow_resume_change)


def rotation_of(settings: TrainingSection) -> dict[str, Any]:
    """Return the arguments of `checkpoints.to_keep`."""
    keep = {"keep": settings.keep_checkpoints, "keep_every": settings.keep_every_steps}
    return keep | {"keep_best": settings.keep_best_checkpoint}


def output_dir_of(recipe: TrainingRecipe) -> str:
    """Return --output_dir, or runs/NAME if --output_dir is not set.

    NAME is the name of the recipe file. If --dataset_dir was passed and differs from the folder in the recipe file,
    NAME is the name of the passed folder.
    """
    folder, own = Path(recipe.data.dataset_dir).name, Path(recipe.written.get("data", {}).get("dataset_dir", "")).name
    return expand(recipe.training.output_dir or "") or f"runs/{recipe.path.stem if folder in ('', own) else folder}"
