"""The recipe section `training:`: transformers' TrainingArguments with the recipe of llm.c as its defaults."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from transformers import TrainingArguments
from transformers.training_args import OptimizerNames

from gpt2_repro.batch_plan import SamplingStrategy, TokenCount
from gpt2_repro.data.arguments import DataArguments, name_folder
from gpt2_repro.errors import UserError, did_you_mean
from gpt2_repro.evaluation.arguments import EvaluationArguments
from gpt2_repro.model.arguments import ModelArguments, check_model, follow_checkpoint
from gpt2_repro.recipe import Recipe, parse_recipe


MUON = "muon"
_LAST_WEIGHTS = "pre-training keeps the last weights"
_PUSH_LATER = "train first, then push final/"
_LOSSES_ONLY = "validation computes losses only"
# The range of a value, and the options that it holds for. All other checks need several options, or the machine.
RANGES: dict[str, tuple[Callable[[float], bool], tuple[str, ...]]] = {
    "more than 0": (
        lambda value: value > 0,
        ("learning_rate", "adam_epsilon", "per_device_eval_batch_size", "logging_steps"),
    ),
    "at least 0": (
        lambda value: value >= 0,
        (
            *("tokens_per_step", "total_tokens", "epochs", "per_device_train_batch_size"),
            *("weight_decay", "max_grad_norm", "warmup_steps", "max_steps", "stop_at_step", "eval_steps"),
            *("hellaswag_steps", "sample_steps", "sample_tokens", "save_steps", "save_minutes", "keep_checkpoints"),
            *("keep_every_steps", "max_hours", "max_usd", "usd_per_hour", "hang_timeout", "skip_loss_z"),
            *("skip_grad_z", "dataloader_num_workers", "seed"),
        ),
    ),
    "from 0 to 1": (lambda value: 0 <= value <= 1, ("final_learning_rate_fraction", "decay_fraction")),
    "at least 0 and less than 1": (lambda value: 0 <= value < 1, ("adam_beta1", "adam_beta2")),
}
OPTIMIZERS = (MUON, *(name.value for name in OptimizerNames))
Schedule = Literal["cosine", "warmup_stable_decay", "constant"]  # optimization.py has their formulas


def _field(default: Any, help: str, **parsing: Any) -> Any:
    return dataclasses.field(default=default, metadata={"help": help} | parsing)


def _switch(help: str) -> Any:
    return _field(None, help, nargs="?", const=True)


@dataclasses.dataclass
class TrainingSection(TrainingArguments):
    """The section as the recipe and the command line state it. Nothing is derived or initialized."""

    output_dir: str | None = _field(None, "The run directory. (default: runs/ and the name of the recipe or the data)")
    tokens_per_step: TokenCount = _field(
        TokenCount(524_288), "Target tokens of one optimizer step, on any layout. 0: by the text."
    )
    total_tokens: TokenCount = _field(
        TokenCount(9_890_693_120), "Target tokens of the run. 0: 4 epochs of the text, or fewer."
    )
    epochs: float = _field(0.0, "Passes over the training rows, in place of total_tokens. 0: total_tokens counts.")
    max_steps: int = _field(0, "Optimizer steps, in place of total_tokens: for smoke runs. 0 derives them.")
    stop_at_step: int = _field(0, "Stop with a checkpoint after this step; the schedule stays. 0 goes to the end.")
    per_device_train_batch_size: int = _field(
        64, "Rows of one forward pass on one device (micro-batch). 0: by the step."
    )
    learning_rate: float = _field(6e-4, "Peak learning rate.")
    warmup_steps: float = _field(700, "Steps of linear warm-up, or below 1 their share of all steps.")
    lr_scheduler_type: Schedule = _field("cosine", "Learning-rate schedule after the warm-up.")
    final_learning_rate_fraction: float = _field(0.0, "Where the learning rate ends, as a fraction of the peak.")
    decay_fraction: float = _field(0.2, "warmup_stable_decay: the share of the steps in which the rate falls.")
    optim: str = _field("adamw_torch_fused", "A transformers name, or muon for matrices (not under ZeRO or FSDP).")
    weight_decay: float = _field(0.1, "AdamW's decay of matrices and embeddings; biases and norms have none.")
    adam_beta2: float = _field(0.95, "AdamW's second beta; transformers' default is 0.999.")
    max_grad_norm: float = _field(1.0, "Clip gradients to this global norm.")
    bf16: bool = _field(True, "Multiply in bf16 with fp32 master weights; fp32 on CPUs without bf16 instructions.")
    accept_any_hardware: bool = _field(False, "Use the CPU if there is no GPU, and fp32 if there is no bf16.")
    eval_strategy: Literal["steps", "no"] = _field("steps", "Validate every eval_steps (steps) or never (no).")
    eval_steps: int = _field(
        250, "Steps between validations; also before the first and after the last step. 0: never."
    )
    eval_on_start: bool = _field(True, "Validate before the first step.")
    eval_tokens: TokenCount = _field(TokenCount(10_485_760), "Validation tokens; 0 takes the whole validation split.")
    per_device_eval_batch_size: int = _field(64, "Rows of one validation pass on one device.")
    hellaswag_steps: int = _field(0, "Steps between HellaSwag scores, each with a validation; 0 never scores it.")
    hellaswag_data: str = _field("Rowan/hellaswag", "HellaSwag's validation split: a Hub id or a .jsonl(.gz) file.")
    sample_steps: int = _field(1000, "Steps between text samples, each with a validation; 0 writes none.")
    sample_tokens: int = _field(64, "Tokens of a sample; 0 writes none.")
    sample_prompt: str = _field("", "What samples continue; empty starts a document.")
    logging_steps: int = _field(10, "Steps between lines of the metrics log.")
    logging_first_step: bool = _field(True, "Log the first step too.")
    logging_nan_inf_filter: bool = _field(False, "Hide losses that are not finite; True also syncs every micro-step.")
    save_strategy: Literal["steps", "no"] = _field("steps", "Save by steps and minutes, or only on a stop (no).")
    save_steps: int = _field(2000, "Steps between checkpoints; 0 saves by save_minutes only, and at the end.")
    save_minutes: float = _field(15.0, "Minutes after which a checkpoint is due at any step; 0 counts steps only.")
    keep_checkpoints: int = _field(2, "Complete checkpoints to keep, the newest ones; 0 keeps all.")
    keep_best_checkpoint: bool = _field(True, "Also keep the checkpoint with the lowest validation loss at its step.")
    keep_every_steps: int = _field(0, "Keep for good the checkpoints of every so many steps; 0 keeps none.")
    resume_from: str = _field("", "Go back to this checkpoint of the run, such as checkpoint-1000. Empty: the newest.")
    allow_resume_change: bool = _field(False, "Go on although data, schedule, model or seed are not what they were.")
    extend_to: TokenCount = _field(TokenCount(0), "Extend the run to so many tokens, with a new warm-up. 0: never.")
    max_hours: float = _field(0.0, "Stop with a checkpoint after so many hours of all attempts; 0: never.")
    max_usd: float = _field(0.0, "Stop with a checkpoint when the run has cost so much at usd_per_hour; 0: never.")
    usd_per_hour: float = _field(0.0, "Price of the whole machine. 0: the list price of its cards, if it is known.")
    hang_timeout: float = _field(600.0, "Seconds without progress until all ranks print stacks and exit; 0: never.")
    skip_loss_z: float = _field(0.0, "Skip updates with a loss so many deviations above the last 128. 0: none.")
    skip_grad_z: float = _field(0.0, "The same for the gradient norm, before clipping.")
    train_sampling_strategy: SamplingStrategy = _field("random", "Order of rows; by length needs packing wrap.")
    dataloader_num_workers: int = _field(2, "Processes that read rows ahead, per device.")
    torch_compile: bool | None = _switch("Compile the loss and its gradient. (default: true on GPUs)")
    activation_checkpointing: bool | None = _switch("Recompute each block in the backward pass to save memory.")
    ddp_find_unused_parameters: bool | None = _field(False, "DDP looks for parameters without gradient: none here.")
    remove_unused_columns: bool = _field(False, "Must stay False: the collator reads its rows itself.")

    refused: ClassVar[dict[str, str]] = {
        "gradient_accumulation_steps": "it is derived; pass --tokens_per_step",
        "num_train_epochs": "the length of a run is counted in tokens; pass --epochs, --total_tokens or --max_steps",
        "deepspeed": "pass accelerate launch --config_file accelerate_configs/zero1.yaml",
        "fsdp": "pass accelerate launch --config_file accelerate_configs/fsdp2.yaml",
        "fsdp_config": "the launcher's config file chooses the sharding",
        "parallelism_config": "the launcher's config file chooses the parallelism",
        "accelerator_config": "batches are never dispatched or split, and copied without blocking",
        "auto_find_batch_size": "it changes the tokens per step; find a size with python -m gpt2_repro.preflight",
        "enable_jit_checkpoint": "it saves the wrong step under DeepSpeed and deadlocks on several ranks",
        **dict.fromkeys(("load_best_model_at_end", "metric_for_best_model", "greater_is_better"), _LAST_WEIGHTS),
        "save_total_limit": "pass --keep_checkpoints, which counts complete checkpoints only",
        "save_only_model": "checkpoints can always be resumed; final/ has the model only",
        "save_on_each_node": "rank 0 completes each checkpoint",
        "hub_token": "it would be written into every checkpoint; set HF_TOKEN in the environment",
        **dict.fromkeys(("push_to_hub", "hub_model_id", "hub_strategy"), _PUSH_LATER),
        **dict.fromkeys(("hub_private_repo", "hub_always_push", "hub_revision"), _PUSH_LATER),
        **dict.fromkeys(("use_liger_kernel", "liger_kernel_config"), "it has no GPT-2 patch"),
        "remove_unused_columns": "the collator reads its rows itself",
        "fp16": "training is in bf16; pass --no_bf16 for fp32",
        **dict.fromkeys(("fp16_full_eval", "bf16_full_eval"), "validation computes as training does"),
        "lr_scheduler_kwargs": "pass --final_learning_rate_fraction or --decay_fraction",
        "label_smoothing_factor": "the logged loss is the negative log-likelihood",
        "neftune_noise_alpha": "it is a fine-tuning technique that changes the loss",
        "label_names": "the collator names its labels",
        "length_column_name": "the collator knows the lengths of its rows",
        **dict.fromkeys(("prediction_loss_only", "include_for_metrics", "batch_eval_metrics"), _LOSSES_ONLY),
        **dict.fromkeys(("eval_accumulation_steps", "eval_do_concat_batches", "eval_use_gather_object"), _LOSSES_ONLY),
        "average_tokens_across_devices": "the loss is always the mean over the tokens of all devices",
        "include_num_input_tokens_seen": "the targets trained are logged; counting inputs too syncs each micro-step",
        "resume_from_checkpoint": "resuming is automatic: run the same command again, or pass --resume_from checkpoint-N",
        "ignore_data_skip": "a resumed run never repeats rows",
        "restore_callback_states_from_checkpoint": "resuming is automatic: run the same command again",
        "dataloader_drop_last": "the sampler drops the rows that fill no step",
        "torch_compile_backend": "the loss is compiled by inductor",
        "torch_compile_mode": "the loss is compiled by inductor in its default mode",
        "dataloader_persistent_workers": "workers live as long as the run",
        "do_train": "train.py always trains. Leave it out",
        "do_eval": "pass --eval_steps; 0 never validates",
        "do_predict": "generate text with python -m gpt2_repro.generate RUN",
        "gradient_checkpointing": "pass --activation_checkpointing",
        "gradient_checkpointing_kwargs": "pass --activation_checkpointing_kwargs",
        "use_cache": "it is off in training and on in final/",
        "local_rank": "the launcher sets it",
    }

    def __post_init__(self) -> None:
        """Check each value. TrainingArguments' own would derive values and start the distributed process group."""
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        for text, (holds, names) in RANGES.items():
            for name in names:
                if not holds(getattr(self, name)):
                    fix = f"such as --{name} {defaults[name]}"
                    raise UserError(f"--{name} {getattr(self, name)} must be {text}, {fix}")
        if self.optim not in OPTIMIZERS:
            raise UserError(f"There is no --optim {self.optim}: {did_you_mean(self.optim, OPTIMIZERS)}")
        if not self.eval_steps:
            self.eval_strategy = "no"


class PretrainingArguments(TrainingSection):
    """TrainingArguments for one process of a run, with everything derived by `resolve.resolve_arguments`."""

    def __post_init__(self) -> None:
        # model/compilation.py compiles the loss, inside of what wraps the model; Trainer would compile the wrapper.
        self.compile_loss, self.torch_compile = bool(self.torch_compile), False
        # transformers refuses muon and schedules that it does not have. The Trainer subclass builds both.
        muon, self.optim = self.optim == MUON, "adamw_torch_fused" if self.optim == MUON else self.optim
        schedule, self.lr_scheduler_type = self.lr_scheduler_type, "constant"
        TrainingArguments.__post_init__(self)
        self.optim = MUON if muon else self.optim
        self.lr_scheduler_type = schedule

    @property
    def last_step(self) -> int:
        """Where this run ends: at the end of its schedule or at stop_at_step."""
        return min(self.stop_at_step or self.max_steps, self.max_steps)

    @property
    def compiles_one_row(self) -> bool:
        """Whether passes of one row are to be compiled."""
        return self.compile_loss and 1 in (self.per_device_train_batch_size, self.per_device_eval_batch_size)


TrainingRecipe = Recipe[DataArguments, ModelArguments, TrainingSection, EvaluationArguments]


def load_recipe(argv: Sequence[str], **parsing: Any) -> TrainingRecipe:
    """Parse a recipe of train.py. Its model has the shape of the `init_from` checkpoint, if there is one.

    Args:
        argv: the command line after the program's name.
        parsing: further arguments of `recipe.parse_recipe`.

    Raises UserError for every mistake that needs neither the data nor the machine to be seen.
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
    check_warmup(recipe.training)
    data = name_folder(recipe.data, recipe.typed)
    model = follow_checkpoint(recipe.model, recipe.stated)
    check_model(model, packing=recipe.data.packing, separator=recipe.data.separator)
    return dataclasses.replace(recipe, data=data, model=model)


def count_steps(training: TrainingSection) -> int:
    """Return the optimizer steps of a whole run. Raises UserError if there are none."""
    steps = training.max_steps or training.total_tokens // training.tokens_per_step
    if steps < 1:
        short = f"--total_tokens {training.total_tokens} is less than a step"
        raise UserError(f"{short}. Pass at least --total_tokens {training.tokens_per_step}.")
    return steps


def check_warmup(training: TrainingSection) -> None:
    """Raise UserError if the warm-up does not end before the run does. A length that is not derived yet passes."""
    if training.epochs or not (training.tokens_per_step and (training.max_steps or training.total_tokens)):
        return
    steps = count_steps(training)
    if training.warmup_steps >= max(1, steps):
        fix = f"Pass fewer, such as --warmup_steps {steps // 10}."
        raise UserError(
            f"--warmup_steps {training.warmup_steps} is not less than the {steps:,} steps of the run. {fix}"
        )


def warmup_steps(training: TrainingSection, max_steps: int) -> int:
    """Return the steps of the warm-up. A number below 1 is a share of `max_steps`."""
    asked = training.warmup_steps
    return int(asked) if asked >= 1 else round(asked * max_steps)


def output_dir_of(recipe: TrainingRecipe) -> str:
    """Return the run directory: runs/ and the name of the recipe, or of the data if it is not the recipe's own."""
    folder, own = Path(recipe.data.dataset_dir).name, Path(recipe.written.get("data", {}).get("dataset_dir", "")).name
    return recipe.training.output_dir or f"runs/{recipe.path.stem if folder in ('', own) else folder}"
