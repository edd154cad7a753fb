"""The life of a run: check the settings, choose the start, build, train, and end."""

import contextlib
import gc
import logging
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from gpt2_repro import checkpoints, ranks
from gpt2_repro.batch_plan import BatchPlan
from gpt2_repro.checkpoints.copying import RunCopier
from gpt2_repro.checkpoints.restoring import restore_copies
from gpt2_repro.checkpoints.resuming import RunIdentity, Start, choose_start, loadable, prepare_run_directory
from gpt2_repro.data.prepared import PreparedData
from gpt2_repro.errors import Diverged, RunFailed
from gpt2_repro.files import sync, write_whole
from gpt2_repro.hardware import find_accelerator
from gpt2_repro.launchers import deepspeed_json
from gpt2_repro.planning.recipe import TrainingRecipe, TrainingSection
from gpt2_repro.run_record import RunRecord, events
from gpt2_repro.run_record.environment import TrainingRecord
from gpt2_repro.run_record.layout import STATUS
from gpt2_repro.run_record.notes import RUN, WENT_BACK, note
from gpt2_repro.run_record.time_breakdown import breakdown
from gpt2_repro.training.settings import resolve_settings, run_identity_of, settings_from, to_training_arguments


if TYPE_CHECKING:  # imports of several seconds
    from transformers import PreTrainedConfig

    from gpt2_repro.model.attention import Choice
    from gpt2_repro.training.trainer import PretrainingArguments, PretrainingTrainer

logger = logging.getLogger(__name__)

COPY_SECONDS = 120.0  # longest time to copy a run that has failed


def train(recipe: TrainingRecipe, data: PreparedData, *, deviations: dict[str, Any]) -> None:
    """Start or resume the run of a recipe. A finished run is not changed.

    This is a collective: call it on all ranks.

    Args:
        recipe: a recipe whose model and batch sizes are set (not 0), see `sizing.follow_data`.
        deviations: the result of `deviations.compare_with_default`, to be written to environment.json.

    Raises UserError for wrong settings, before the model is built. Raises RunFailed if the run fails.
    """
    # --- Settings and checks, before torch is imported
    settings, plan = resolve_settings(recipe)
    run = RunRecord(str(settings.output_dir))
    run.end_phase("settings")
    data.check()
    identity = run_identity_of(settings, plan, data=data.manifest, model=recipe.model)

    # --- Where to start
    def restore_and_choose() -> Start:
        verified = restore_copies(run, identity, sync_from=settings.sync_from, sync_to=settings.sync_to)
        return choose_start(
            run,
            identity,
            max_steps=plan.max_steps,
            resume_from=settings.resume_from,
            init_from=recipe.model.init_from,
            verified=verified,
        )

    start = ranks.decide(restore_and_choose)
    run.end_phase("data and checkpoints")
    if start.is_finished:
        return copy_again(run, settings, identity)

    # --- Build
    args = to_training_arguments(settings_from(settings, start), plan)  # starts the process group
    run.end_phase("imports")
    json = deepspeed_json()
    further = {"plan": plan, "eval_tokens": settings.eval_tokens, "data": data.manifest.sha256}
    ranks.check_equal({**identity.values, **further} | {"DeepSpeed JSON": json and json.read_bytes()})
    trainer = build_trainer(args, recipe, plan, data, run, start, identity, deviations)

    # --- Train, and write the final model
    with lifecycle(trainer, start) as checkpoint:
        trainer.train(resume_from_checkpoint=checkpoint)
        trainer.settle()
        if trainer.is_complete:
            save_final(trainer)
        else:
            trainer.record_stop()


def copy_again(run: RunRecord, settings: TrainingSection, identity: RunIdentity) -> None:
    """Copy what --sync_to lacks of a run that is already complete."""
    note(RUN, str(run.path.resolve()))
    if ranks.is_main():
        if run.status().state != "complete":
            run.write_status("complete", reason=None)
        if settings.sync_to:
            copier = RunCopier(run, settings.sync_to, settings.rotation, identity)
            for _ in copier.finish():
                pass
            copier.require_copied()
    logger.info("%s is already complete: %s. To train again, pass a new --output_dir.", run.path, run.final)


def build_trainer(
    args: "PretrainingArguments",
    recipe: TrainingRecipe,
    plan: BatchPlan,
    data: PreparedData,
    run: RunRecord,
    start: Start,
    identity: RunIdentity,
    deviations: dict[str, Any],
) -> "PretrainingTrainer":
    """Open the data, build the model, claim the run directory, and return the Trainer."""
    from transformers import set_seed

    from gpt2_repro.model.architecture import check_architecture
    from gpt2_repro.model.build import build_model
    from gpt2_repro.model.configuration import build_config
    from gpt2_repro.model.document_mask import Documents
    from gpt2_repro.training.announce import announce, describe_run
    from gpt2_repro.training.inputs import open_inputs
    from gpt2_repro.training.tracking import prepare_tracking
    from gpt2_repro.training.trainer import PretrainingTrainer

    inputs, model, length = open_inputs(data, args.settings), recipe.model, plan.sequence_length
    tokenizer, vocab_size = inputs.tokenizer, data.manifest.vocab_size
    run.end_phase("opening the data")
    config = build_config(model, sequence_length=length, vocab_size=vocab_size, tokenizer=tokenizer)
    check_architecture(config, document_mask=model.document_mask)
    run.end_phase("checking the architecture")
    attention = _choose_kernel(args, recipe, config, run)
    run.end_phase("choosing the kernel")
    set_seed(args.seed)
    documents = Documents(tokenizer.eos_token_id, behind=recipe.data.separator == "after")
    network = build_model(
        config,
        tokenizer,
        attention=attention.name,
        init_from="" if start.checkpoint else model.init_from,
        documents=documents if model.document_mask else None,
        compiled=bool(args.settings.torch_compile),
    )
    run.end_phase("building the model")
    if ranks.is_main():
        # Not for a run of the stored recipe.
        stored = recipe.with_training(output_dir=args.output_dir, resume_from="", sync_to="", sync_from="")
        run.claim(stored.to_yaml())
    environment = describe_run(
        args.settings,
        plan,
        network,
        data.manifest,
        attention=str(attention),
        run_identity=identity.values,
        **deviations,
    )
    announce(environment)
    prepare_tracking(args.report_to, run.path)  # before the Trainer imports wandb
    trainer = PretrainingTrainer(
        model=network, args=args, inputs=inputs, run=run, environment=environment, identity=identity
    )
    add_callbacks(trainer)
    return trainer


def _choose_kernel(
    args: "PretrainingArguments", recipe: TrainingRecipe, config: "PreTrainedConfig", run: RunRecord
) -> "Choice":
    """Choose the attention kernel on rank 0, because timings differ between ranks."""
    from accelerate.utils import broadcast_object_list

    from gpt2_repro.model.attention import Machine, choose_attention

    requested, kernel = recipe.model.attn_implementation, None
    if requested != "auto" or ranks.is_main():
        rows = args.per_device_train_batch_size
        one_row = bool(args.settings.torch_compile) and 1 in (rows, args.per_device_eval_batch_size)
        is_cuda, length, is_masked = (
            args.device.type == "cuda",
            recipe.data.sequence_length,
            recipe.model.document_mask,
        )
        machine = Machine(is_cuda, args.bf16, length, one_row, is_masked, fp16=args.fp16)
        # The kernel of the previous attempt, unless it was on another type of GPU.
        before = run.environment()
        is_same = before.accelerator.name == find_accelerator(use_cpu=args.use_cpu).name
        earlier = before.engine.get("attention") or (before.attention or "").partition(" ")[0]
        kernel = choose_attention(requested, machine, config, rows=rows, earlier=earlier if is_same else "")
    return broadcast_object_list([kernel])[0]


def add_callbacks(trainer: "PretrainingTrainer") -> None:
    """Add callbacks that print progress and generate samples.

    Exceptions in callbacks that report to tracking services are caught from now on.
    """
    from transformers import PrinterCallback
    from transformers.trainer import DEFAULT_PROGRESS_CALLBACK
    from transformers.utils.logging import disable_progress_bar

    from gpt2_repro.training.callbacks import ProgressBar
    from gpt2_repro.training.samples import TextSampler
    from gpt2_repro.training.tracking import Guarded, guard_reporting

    guard_reporting(trainer)
    disable_progress_bar()  # each save would draw a bar over the progress bar of the run
    for stock in (DEFAULT_PROGRESS_CALLBACK, PrinterCallback):
        trainer.remove_callback(stock)
    trainer.add_callback(ProgressBar(trainer.validation.batches, trainer.environment.reference))
    # add_callback warns of a second Guarded.
    trainer.callback_handler.callbacks.append(Guarded(TextSampler(trainer)))


@contextlib.contextmanager
def lifecycle(trainer: "PretrainingTrainer", start: Start) -> Iterator[str | None]:
    """Prepare the training, yield the folder for Trainer to load, and record how the run ends.

    A collective. Raises RunFailed if the run fails, or if it is not copied to --sync_to.
    """
    from gpt2_repro.training.sharded import shard_by_fsdp

    run, args, saver = trainer.run, trainer.args, trainer.saver
    trainer.when.signals.install()
    trainer.restore(start)
    if ranks.is_main():
        prepare_run_directory(run, start, max_steps=trainer.plan.max_steps, validates_again=args.eval_on_start)
    ranks.check_shared(run.path / STATUS)
    if args.local_process_index == 0:
        note(RUN, str(run.path.resolve()))
        if args.settings.resume_from:
            note(WENT_BACK, args.settings.resume_from)
    try:
        saver.check_disk()
        folder = loadable(start, staging=saver.staging, accelerator=trainer.accelerator)
        saver.start(trainer.environment, is_new=start.checkpoint is None)
        shard_by_fsdp(trainer.model, trainer.accelerator)
        trainer.watchdog.arm()
        gc.freeze()  # collections do not visit the objects that imports have created
        gc.set_threshold(700, 10, 10)  # Python's default, see cli.run
        run.end_phase("building the Trainer")
        yield folder
        saver.finish_copies()
        trainer.watchdog.disarm()
        # If a rank exits while others still work, its sockets close, and gloo aborts at exit.
        trainer.accelerator.wait_for_everyone()
        trainer.accelerator.end_training()
        if ranks.is_main():
            report_end(trainer)
    except BaseException as error:
        reason = str(error) if isinstance(error, RunFailed) else f"{type(error).__name__}: {error}"
        trainer.record("diverged" if isinstance(error, Diverged) else "failed", reason=reason)
        saver.close()  # the writer still completes the last checkpoint
        if isinstance(error, Exception):
            saver.copy_rest(COPY_SECONDS)
        raise
    saver.close()
    saver.require_copied()


def save_final(trainer: "PretrainingTrainer") -> None:
    """Write final/, and mark the run as complete. A collective.

    final/ has the fp32 weights, or their average over steps if the run computes one.
    """
    from gpt2_repro import tokenization
    from gpt2_repro.evaluation.model_card import model_card
    from gpt2_repro.model.pretraining import plain_model, save_plain
    from gpt2_repro.training.engine import fp32_weights
    from gpt2_repro.training.sharded import build_whole

    run, saver, is_averaged = trainer.run, trainer.saver, trainer.average.exists
    with trainer.meter.on("saving"):
        with trainer.average.applied() if is_averaged else contextlib.nullcontext():
            weights = fp32_weights(trainer.model, keep=ranks.is_main())
        if not ranks.is_main():
            return saver.wait_for(run.final)
        trainer.record("running")
        build_whole()
        staged = saver.staging
        with checkpoints.disk_faults_in_words(run.path, run.final.name, staged):
            shutil.rmtree(staged, ignore_errors=True)
            save_plain(plain_model(trainer.model.config, weights), staged)
            trainer.watchdog.arm()
            tokenization.save(trainer.processing_class, staged)
            step = trainer.state.global_step
            losses = events.final_losses(run.metrics, step, averaged=is_averaged)
            facts = {"step": step, "tokens": trainer.tokens_trained, "losses": losses}
            checkpoints.seal(staged, {}, **facts, environment=trainer.environment.to_json())
            # The model card is not in the manifest.
            card = model_card(run.path.resolve().name, TrainingRecord(**facts, environment=trainer.environment))
            write_whole(staged / "README.md", card)
            sync(staged)
        checkpoints.publish(staged, run.final)
        trainer.record("complete", reason=None)
    logger.info("The run is complete. The final model is in %s.", run.final)


def report_end(trainer: "PretrainingTrainer") -> None:
    """Log whether the loss is in the range of llm.c's runs, the time by activity, and how to continue."""
    from gpt2_repro.evaluation.references import explained

    losses, reference = trainer.eval_losses, trainer.environment.reference
    if "eval_loss" in losses and (message := explained(reference, int(losses["step"]), losses["eval_loss"])):
        logger.info(message)
    table = breakdown(trainer.run.time_breakdown(), usd_per_hour=trainer.args.settings.usd_per_hour)
    logger.info("time of the run by activity:\n  %s", "\n  ".join(table.lines()[1:]))
    if reason := trainer.when.reason:
        option = reason.partition(" ")[0] if reason.startswith("--") else ""
        why, fix = (f", because of {reason}", f"with a larger {option}") if option else ("", "again")
        logger.info("Stopped at step %d%s. Run the command %s to continue.", trainer.state.global_step, why, fix)
