"""Define the fields of the recipe section `training:`, with llm.c's defaults."""

import dataclasses
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from transformers import TrainingArguments
from transformers.training_args import OptimizerNames

from gpt2_repro.batch_plan import SamplingStrategy, TokenCount
from gpt2_repro.data.arguments import DataArguments, name_folder
from gpt2_repro.errors import UserError, did_you_mean
from gpt2_repro.evaluation.arguments import EvaluationArguments
from gpt2_repro.files import expand
from gpt2_repro.model.arguments import ModelArguments, check_model, follow_checkpoint
from gpt2_repro.optim import OWN_OPTIMIZERS, Schedule
from gpt2_repro.recipe import Recipe, parse_recipe


_LAST_WEIGHTS = "final/ has the last weights. Remove it. The best checkpoint is kept with --keep_best_checkpoint"
_PUSH_LATER = "train.py does not push to the Hub. Push final/ after the training"
_LOSSES_ONLY = "validation computes losses only"
# Valid ranges and the options they apply to. Checks that need several options or the machine are in other functions.
RANGES: dict[str, tuple[Callable[[float], bool], tuple[str, ...]]] = {
    "more than 0": (lambda value: value > 0, ("adam_epsilon", "per_device_eval_batch_size", "logging_steps")),
    "more than 0 and less than 1": (lambda value: 0 < value < 1, ("learning_rate",)),
    "at least 0": (
        lambda value: value >= 0,
        (
            *("tokens_per_step", "total_tokens", "epochs", "max_steps", "stop_at_step", "eval_steps", "ema_steps"),
            *("per_device_train_batch_size", "max_grad_norm", "skip_loss_z", "skip_grad_z", "warmup_steps"),
            *("hellaswag_steps", "sample_steps", "sample_tokens", "save_steps", "save_minutes", "keep_checkpoints"),
            *("save_rolling_minutes", "keep_every_steps", "max_hours", "max_usd", "usd_per_hour"),
        ),
    ),
    "from 0 to 256": (lambda value: 0 <= value <= 256, ("dataloader_num_workers",)),
    "0 or from 10 to 1,000,000": (lambda value: value == 0 or 10 <= value <= 1e6, ("hang_timeout",)),
    "from 0 to 10": (lambda value: 0 <= value <= 10, ("weight_decay",)),
    "from 0 to 4294967295": (lambda value: 0 <= value < 2**32, ("seed",)),
    "from 0 to 1": (lambda value: 0 <= value <= 1, ("final_learning_rate_fraction", "decay_fraction")),
    "at least 0 and less than 1": (lambda value: 0 <= value < 1, ("adam_beta1", "adam_beta2", "muon_momentum")),
}
OPTIMIZERS = (*OWN_OPTIMIZERS, *(name.value for name in OptimizerNames))


def _field(default: Any, help: str, **parsing: Any) -> Any:
    return dataclasses.field(default=default, metadata={"help": help} | parsing)


def _switch(help: str) -> Any:
    return _field(None, help, nargs="?", const=True)


@dataclasses.dataclass
class TrainingSection(TrainingArguments):
    """The training settings, as written in the recipe and on the command line."""

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
    optim: str = _field("adamw_torch_fused", "An optimizer of transformers, muon or mars (not under ZeRO-3 or FSDP).")
    muon_momentum: float = _field(0.95, "Momentum of Muon. Small steps can need less.")
    ema_steps: int = _field(0, "Also average the weights over about N steps; final/ is the average. 0: never.")
    weight_decay: float = _field(0.1, "Weight decay of matrices and embeddings; biases and norms are not decayed.")
    adam_beta2: float = _field(0.95, "AdamW's second beta. The default of transformers is 0.999.")
    max_grad_norm: float = _field(1.0, "Clip gradients to this global norm.")
    bf16: bool = _field(True, "Compute in bf16, with fp32 master weights. CPUs without bf16 instructions use fp32.")
    accept_any_hardware: bool = _field(False, "Use the CPU if no GPU is found, and fp32 if bf16 is not supported.")
    eval_strategy: Literal["steps", "no"] = _field("steps", "steps: validate every eval_steps steps. no: never.")
    eval_steps: int = _field(
        250, "Steps between validations. The run also validates before the first and after the last step. 0: never."
    )
    eval_on_start: bool = _field(True, "Validate before the first step.")
    eval_tokens: TokenCount = _field(TokenCount(10_485_760), "Tokens per validation. 0: the complete split.")
    per_device_eval_batch_size: int = _field(64, "Rows per device in one validation pass.")
    hellaswag_steps: int = _field(0, "Score HellaSwag every N steps, with the next validation. 0: never.")
    hellaswag_data: str = _field("Rowan/hellaswag", "HellaSwag's validation split: a Hub id or a .jsonl(.gz) file.")
    sample_steps: int = _field(1000, "Sample text every N steps, with the next validation. 0: never.")
    sample_tokens: int = _field(64, "Tokens per text sample. 0: no samples.")
    sample_prompt: str = _field("", "Prompt of the text samples. Empty: begin a new document.")
    logging_steps: int = _field(10, "Steps between log lines with training metrics.")
    logging_first_step: bool = _field(True, "Also log the first step.")
    logging_nan_inf_filter: bool = _field(False, "Omit losses that are not finite; adds a host sync per micro-batch.")
    save_strategy: Literal["steps", "no"] = _field("steps", "steps: save at intervals. no: only at an early stop.")
    save_steps: int = _field(2000, "Steps between checkpoints. 0: save after save_minutes and at the end.")
    save_minutes: float = _field(15.0, "Save if the last checkpoint is N minutes old. 0: save by save_steps only.")
    save_rolling_minutes: float = _field(
        2.0, "Also save every N minutes a checkpoint that replaces the last such checkpoint. 0: never."
    )
    background_save: bool = _field(True, "Train while a checkpoint is written from a copy in host memory.")
    keep_checkpoints: int = _field(2, "Number of newest complete checkpoints to keep. 0 keeps all.")
    keep_best_checkpoint: bool = _field(True, "Also keep the checkpoint with the lowest validation loss at its step.")
    keep_every_steps: int = _field(0, "Never delete checkpoints whose step is a multiple of N. 0: no effect.")
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
    train_sampling_strategy: SamplingStrategy = _field("random", "Order of rows. group_by_length needs packing wrap.")
    dataloader_num_workers: int = _field(2, "Processes per device that load rows in advance.")
    torch_compile: bool | None = _switch("Compile the loss and its gradient. (default: true on GPUs)")
    activation_checkpointing: bool | None = _switch("Recompute each block in the backward pass to save memory.")
    ddp_find_unused_parameters: bool | None = _field(False, "Let DDP search for unused parameters. There are none.")
    remove_unused_columns: bool = _field(False, "Must be False, because the collator reads the rows itself.")

    refused: ClassVar[dict[str, str]] = {
        "gradient_accumulation_steps": "it is derived from tokens_per_step. Pass --tokens_per_step",
        "num_train_epochs": "other options set the length of a run. Pass --epochs, --total_tokens or --max_steps",
        "deepspeed": "the launcher starts it. Run accelerate launch --config_file accelerate_configs/zero1.yaml",
        "fsdp": "the launcher starts it. Run accelerate launch --config_file accelerate_configs/fsdp2.yaml",
        "fsdp_config": "the launcher's config file sets the sharding",
        "parallelism_config": "the launcher's config file sets the parallelism",
        "accelerator_config": "its values are fixed: no dispatch_batches, no split_batches, and non_blocking copies",
        "auto_find_batch_size": "it changes the tokens per step. Run python -m gpt2_repro.preflight to find a size",
        "enable_jit_checkpoint": "it saves the wrong step under DeepSpeed and deadlocks on several ranks",
        **dict.fromkeys(("load_best_model_at_end", "metric_for_best_model", "greater_is_better"), _LAST_WEIGHTS),
        "save_total_limit": "it also counts incomplete checkpoints. Pass --keep_checkpoints",
        "save_only_model": "checkpoints can always be resumed. final/ contains the model only",
        "save_on_each_node": "only rank 0 writes the manifest that completes a checkpoint",
        "hub_token": "it would be written into every checkpoint. Set HF_TOKEN in the environment",
        **dict.fromkeys(("push_to_hub", "hub_model_id", "hub_strategy"), _PUSH_LATER),
        **dict.fromkeys(("hub_private_repo", "hub_always_push", "hub_revision"), _PUSH_LATER),
        **dict.fromkeys(("use_liger_kernel", "liger_kernel_config"), "Liger has no GPT-2 patch"),
        "debug": "its checks are for other models. Updates that are not finite are always skipped",
        "remove_unused_columns": "the collator reads the rows itself",
        "fp16": "training uses bf16. Pass --no_bf16 for fp32",
        **dict.fromkeys(("fp16_full_eval", "bf16_full_eval"), "validation uses the precision of training"),
        "lr_scheduler_kwargs": "each setting is an option. Pass --final_learning_rate_fraction or --decay_fraction",
        "label_smoothing_factor": "the logged loss must be the plain negative log-likelihood",
        "neftune_noise_alpha": "it is a fine-tuning technique that changes the loss",
        "label_names": "the collator sets the names of the labels",
        "length_column_name": "the lengths are read from the rows",
        **dict.fromkeys(("prediction_loss_only", "include_for_metrics", "batch_eval_metrics"), _LOSSES_ONLY),
        **dict.fromkeys(("eval_accumulation_steps", "eval_do_concat_batches", "eval_use_gather_object"), _LOSSES_ONLY),
        "average_tokens_across_devices": "the loss is always the mean over the tokens of all devices",
        "include_num_input_tokens_seen": "target tokens are logged. Counting inputs adds a host sync per micro-batch",
        "optim_args": "each setting is an option. Pass --adam_beta1, --adam_beta2, --adam_epsilon or --muon_momentum",
        "local_rank": "the launchers `deepspeed` and torch.distributed.launch add it. Launch with torchrun, or with "
        "accelerate launch --config_file accelerate_configs/zero1.yaml",
        "resume_from_checkpoint": "resuming is automatic. Run the same command, or pass --resume_from checkpoint-N",
        "ignore_data_skip": "a resumed run never repeats rows",
        "restore_callback_states_from_checkpoint": "resuming is automatic. Run the same command again",
        "dataloader_multiprocessing_context": "the workers start with torch's default method",
        "dataloader_drop_last": "the sampler drops the rows that do not fill a step",
        "torch_compile_backend": "the loss is compiled by inductor",
        "torch_compile_mode": "the loss is compiled by inductor in its default mode",
        "dataloader_persistent_workers": "the workers always run until the end of the run",
        "do_train": "train.py always trains. Omit it",
        "do_eval": "--eval_steps turns validation on or off. Pass --eval_steps, with 0 for never",
        "do_predict": "train.py does not generate text. Run python -m gpt2_repro.generate RUN",
        "gradient_checkpointing": "it has another name here. Pass --activation_checkpointing",
        "gradient_checkpointing_kwargs": "it has another name here. Pass --activation_checkpointing_kwargs",
        "use_cache": "it is off during training and on in final/",
    }

    def __post_init__(self) -> None:
        """Raise UserError if a value is out of its range."""
        # TrainingArguments.__post_init__ is not called, because it derives values and starts the process group.
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        for text, (holds, names) in RANGES.items():
            for name in names:
                if not holds(value := getattr(self, name)):
                    example = abs(value) if value < 0 and holds(abs(value)) else defaults[name]
                    raise UserError(f"--{name} {value} must be {text}, such as --{name} {example}.")
        if self.optim not in OPTIMIZERS:
            raise UserError(f"Unknown --optim {self.optim}. {did_you_mean(self.optim, OPTIMIZERS)}")
        if not self.eval_steps:
            self.eval_strategy = "no"


class PretrainingArguments(TrainingSection):
    """The training arguments of one process, with all derived values.

    `resolve.resolve_arguments` creates the instance.
    """

    def __post_init__(self) -> None:
        # model/compilation.py compiles the loss function. Trainer would compile the DDP or DeepSpeed wrapper.
        self.compile_loss, self.torch_compile = bool(self.torch_compile), False
        # transformers rejects optimizers and schedules that it does not have. The Trainer subclass builds them.
        optim, self.optim = self.optim, "adamw_torch_fused" if self.optim in OWN_OPTIMIZERS else self.optim
        schedule, self.lr_scheduler_type = self.lr_scheduler_type, "constant"
        TrainingArguments.__post_init__(self)
        self.optim = optim if optim in OWN_OPTIMIZERS else self.optim
        self.lr_scheduler_type = schedule

    @property
    def last_step(self) -> int:
        """The last optimizer step: max_steps, or stop_at_step if set and earlier."""
        return min(self.stop_at_step or self.max_steps, self.max_steps)

    @property
    def compiles_one_row(self) -> bool:
        """Whether the compiled loss gets batches of one row in training or validation."""
        return self.compile_loss and 1 in (self.per_device_train_batch_size, self.per_device_eval_batch_size)


TrainingRecipe = Recipe[DataArguments, ModelArguments, TrainingSection, EvaluationArguments]


def load_recipe(argv: Sequence[str], **parsing: Any) -> TrainingRecipe:
    """Return the recipe for a command line of train.py.

    If `init_from` names a checkpoint, the model sizes are the sizes of that checkpoint.

    Args:
        argv: the command line after the program's name.
        parsing: additional keyword arguments for `recipe.parse_recipe`.

    Raises UserError for mistakes that can be found without reading the data or checking the hardware.
    """
    recipe = parse_recipe(
        argv,
        data=DataArguments,
        model=ModelArguments,
        training=TrainingSection,
        evaluation=EvaluationArguments,
        offered=("data", "model", "training"),
        **parsing,
    )
    check_warmup(recipe.training, recipe.typed)
    data = name_folder(recipe.data, recipe.typed)
    model = follow_checkpoint(recipe.model, recipe.stated)
    check_model(model, packing=recipe.data.packing, separator=recipe.data.separator)
    return dataclasses.replace(recipe, data=data, model=model)


def count_steps(training: TrainingSection) -> int:
    """Return the number of optimizer steps of a run.

    Raises UserError if the run has fewer tokens than one step.
    """
    steps = training.max_steps or training.total_tokens // training.tokens_per_step
    if steps < 1:
        short = f"--total_tokens {training.total_tokens} is less than the tokens of one step"
        raise UserError(f"{short}. Pass at least --total_tokens {training.tokens_per_step}.")
    return steps


def check_warmup(training: TrainingSection, typed: Collection[str]) -> None:
    """Raise UserError if the warm-up is not shorter than the run.

    Args:
        typed: names of the options that were passed on the command line.
    """
    if training.epochs or not (training.tokens_per_step and (training.max_steps or training.total_tokens)):
        return  # the number of steps is not known yet
    steps = count_steps(training)
    if training.warmup_steps >= max(1, steps):
        fix, origin = f"Pass fewer, such as --warmup_steps {steps // 10}.", ""
        if "warmup_steps" not in typed:
            origin = " of the recipe"
            fix += " For your own text, pass recipes/own_text.yaml." if "dataset_dir" in typed else ""
        problem = f"--warmup_steps {training.warmup_steps:g}{origin} must be less than the {steps:,} steps of the run"
        raise UserError(f"{problem}. {fix}")


def warmup_steps(training: TrainingSection, max_steps: int) -> int:
    """Return the number of warm-up steps.

    A value of `training.warmup_steps` below 1 is a fraction of `max_steps`.
    """
    steps = training.warmup_steps
    return int(steps) if steps >= 1 else round(steps * max_steps)


def output_dir_of(recipe: TrainingRecipe) -> str:
    """Return --output_dir, or runs/NAME if --output_dir is not set.

    NAME is the name of the recipe file. If --dataset_dir was passed and differs from the folder in the recipe file,
    NAME is the name of the passed folder.
    """
    folder, own = Path(recipe.data.dataset_dir).name, Path(recipe.written.get("data", {}).get("dataset_dir", "")).name
    return expand(recipe.training.output_dir or "") or f"runs/{recipe.path.stem if folder in ('', own) else folder}"
