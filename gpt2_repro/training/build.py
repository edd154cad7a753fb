"""Build the Trainer of a run: data, model, attention kernel, environment and callbacks."""

import logging

import torch
from accelerate.utils import broadcast_object_list
from transformers import PreTrainedConfig, PrinterCallback, set_seed
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK
from transformers.utils.logging import disable_progress_bar

from gpt2_repro import hardware, ranks
from gpt2_repro.checkpoints.resuming import Start
from gpt2_repro.errors import UserError
from gpt2_repro.hardware import find_accelerator
from gpt2_repro.launchers import current_launcher
from gpt2_repro.model.architecture import check_architecture
from gpt2_repro.model.attention import Choice, Machine, choose_attention
from gpt2_repro.model.build import build_model
from gpt2_repro.model.configuration import build_config
from gpt2_repro.model.document_mask import Documents
from gpt2_repro.model.mlp import require_mlp
from gpt2_repro.model.pretraining import launch_softmax_kernel, use_torch_softmax
from gpt2_repro.run_record import RunRecord
from gpt2_repro.training.announce import announce, describe_run
from gpt2_repro.training.inputs import open_inputs
from gpt2_repro.training.progress import ProgressBar
from gpt2_repro.training.samples import TextSampler
from gpt2_repro.training.settings import RunSetup
from gpt2_repro.training.step_profile import StepProfile
from gpt2_repro.training.tracking import Guarded, guard_reporting, prepare_tracking
from gpt2_repro.training.trainer import PretrainingArguments, PretrainingTrainer


logger = logging.getLogger(__name__)


def build_trainer(args: PretrainingArguments, setup: RunSetup, start: Start) -> PretrainingTrainer:
    """Open the data, build the model, lock the run directory, and return the Trainer. A collective."""
    section = setup.recipe.model
    inputs = open_inputs(setup.data, args.settings)
    config = build_config(
        section,
        sequence_length=setup.plan.sequence_length,
        vocab_size=setup.data.manifest.vocab_size,
        tokenizer=inputs.tokenizer,
    )
    check_architecture(config, document_mask=section.document_mask)
    check_triton(args, config, requested=setup.recipe.training.torch_compile)
    machine = _machine(args, setup)
    attention = _choose_kernel(args, setup, config, machine)
    whole_weights = current_launcher().whole_weights
    require_mlp(section.mlp_implementation, machine, config, has_whole_weights=whole_weights)
    documents = None
    if section.document_mask:
        documents = Documents(inputs.tokenizer.eos_token_id, behind=setup.recipe.data.separator == "after")
    set_seed(args.seed)
    model = build_model(
        config,
        inputs.tokenizer,
        attention=attention.name,
        mlp=section.mlp_implementation,
        init_from=None if start.checkpoint else section.init_from,
        documents=documents,
        compiled=bool(args.settings.torch_compile),
    )
    if ranks.is_main():
        setup.run.lock()
    environment = describe_run(setup, model, attention=str(attention))
    announce(environment)
    prepare_tracking(args.report_to, setup.run.path)  # before the Trainer imports wandb
    trainer = PretrainingTrainer(
        model=model, args=args, inputs=inputs, run=setup.run, environment=environment, identity=setup.identity
    )
    add_callbacks(trainer)
    return trainer


def check_triton(args: PretrainingArguments, config: PreTrainedConfig, *, requested: bool | None) -> None:
    """Turn off torch.compile and the softmax kernel of the loss, after a warning, if Triton does not work on this GPU.

    Args:
        requested: the recipe's `torch_compile`.

    Raises UserError if `requested` is True.
    """
    if args.device.type != "cuda":
        return
    missing = hardware.compiler_obstacle(use_cpu=False)
    if missing is not None:
        problem = f"Triton needs {missing}"
    else:
        dtype = torch.float32
        if args.bf16:
            dtype = torch.bfloat16
        elif args.fp16:
            dtype = torch.float16
        failure = launch_softmax_kernel(config, args.device, dtype)
        if failure is None:
            return
        problem = f"Triton cannot compile or launch a kernel on this GPU: {failure}"
    if requested:
        raise UserError(f"{problem}. torch.compile needs Triton. Pass --torch_compile false.")
    use_torch_softmax()
    args.turn_off_compile()
    text = "%s. The run uses torch's own kernels and no torch.compile, which may take twice as long."
    logger.warning(text, problem)


def _machine(args: PretrainingArguments, setup: RunSetup) -> Machine:
    """Return the properties of this run that decide which kernels can be used."""
    has_one_row = args.per_device_train_batch_size == 1 or args.per_device_eval_batch_size == 1
    return Machine(
        cuda=args.device.type == "cuda",
        bf16=args.bf16,
        length=setup.recipe.data.sequence_length,
        one_row_compiled=has_one_row and bool(args.settings.torch_compile),
        document_mask=setup.recipe.model.document_mask,
        fp16=args.fp16,
    )


def _choose_kernel(args: PretrainingArguments, setup: RunSetup, config: PreTrainedConfig, machine: Machine) -> Choice:
    """Choose the attention kernel on rank 0, because timings differ between ranks. A collective."""
    requested = setup.recipe.model.attn_implementation
    kernel = None
    if requested != "auto" or ranks.is_main():
        rows = args.per_device_train_batch_size
        earlier = _earlier_kernel(setup.run, use_cpu=args.use_cpu)
        kernel = choose_attention(requested, machine, config, rows=rows, earlier=earlier)
    return broadcast_object_list([kernel])[0]


def _earlier_kernel(run: RunRecord, *, use_cpu: bool) -> str:
    """Return the attention kernel of the previous attempt, or "" if there was none, or on another type of GPU."""
    before = run.environment()
    if before.accelerator.name != find_accelerator(use_cpu=use_cpu).name:
        return ""
    return before.engine.get("attention") or (before.attention or "").partition(" ")[0]


def add_callbacks(trainer: PretrainingTrainer) -> None:
    """Add callbacks that print progress, generate samples and profile a step.

    Exceptions in callbacks that report to tracking services are caught from now on.
    """
    guard_reporting(trainer)
    disable_progress_bar()  # each save would draw a bar over the progress bar of the run
    for stock in (DEFAULT_PROGRESS_CALLBACK, PrinterCallback):
        trainer.remove_callback(stock)
    trainer.add_callback(ProgressBar(trainer.validation.batches, trainer.environment.reference))
    # add_callback warns of a second Guarded.
    trainer.callback_handler.callbacks.append(Guarded(TextSampler(trainer)))
    profiled = trainer.args.settings.profile_step
    if profiled:
        trainer.callback_handler.callbacks.append(Guarded(StepProfile(trainer.run, profiled)))
