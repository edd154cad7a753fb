"""Train to the last step, write the final model, and report the end of a run."""

import contextlib
import gc
import logging
import shutil

from transformers import PrinterCallback
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK
from transformers.utils.logging import disable_progress_bar

from gpt2_repro import tokenization
from gpt2_repro.errors import Diverged, RunFailed
from gpt2_repro.evaluation.model_card import model_card
from gpt2_repro.evaluation.references import explained
from gpt2_repro.files import sync, write_whole
from gpt2_repro.model.pretraining import plain_model
from gpt2_repro.run_record import checkpoints, events
from gpt2_repro.run_record.environment import TrainingRecord
from gpt2_repro.run_record.layout import STAGING, STATUS
from gpt2_repro.run_record.supervision import RUN, WENT_BACK, note
from gpt2_repro.run_record.time_breakdown import breakdown
from gpt2_repro.training import ranks
from gpt2_repro.training.callbacks import CompilationReport, ProgressBar
from gpt2_repro.training.copying import RunCopier
from gpt2_repro.training.engine import fp32_weights
from gpt2_repro.training.hashing import hashed_saves
from gpt2_repro.training.resuming import Start, loadable
from gpt2_repro.training.samples import TextSampler
from gpt2_repro.training.sharded import build_whole, shard_by_fsdp
from gpt2_repro.training.tracking import Guarded, guard_reporting
from gpt2_repro.training.trainer import PretrainingTrainer
from gpt2_repro.training.validation import AVERAGED


logger = logging.getLogger(__name__)

COPY_SECONDS = 120.0  # longest time to copy a run that has failed


def add_callbacks(trainer: PretrainingTrainer) -> None:
    """Add callbacks that print progress, generate samples and check the compilation.

    Exceptions in callbacks that report to tracking services are caught from now on.
    """
    guard_reporting(trainer)
    disable_progress_bar()  # each save would draw a bar over the progress bar of the run
    for stock in (DEFAULT_PROGRESS_CALLBACK, PrinterCallback):
        trainer.remove_callback(stock)
    trainer.add_callback(ProgressBar(trainer.validation.batches, trainer.environment.reference))
    # add_callback warns of a second Guarded.
    trainer.callback_handler.callbacks.append(Guarded(TextSampler(trainer)))
    if trainer.args.compile_loss:
        trainer.add_callback(CompilationReport(trainer.model, record=trainer.record_engine))


def fit(trainer: PretrainingTrainer, start: Start) -> None:
    """Train to the last step and write the final model to final/.

    This is a collective: call it on all ranks. If the training stops early, final/ is not written.

    Raises RunFailed if the disk is full or too many updates are not finite.
    """
    run, args, when = trainer.run, trainer.args, trainer.when
    if start.checkpoint is not None:
        trainer.saver.saved_step, trainer.restored_losses = start.step, start.manifest["loss_window"]
        trainer.guard.load_state(start.manifest["guard"])
    if trainer.is_world_process_zero():
        _prepare_run_directory(trainer, start)
    ranks.check_shared(run.path / STATUS)
    if args.local_process_index == 0:
        note(RUN, str(run.path.resolve()))
        if args.resume_from:
            note(WENT_BACK, args.resume_from)
    try:
        # --- Train
        trainer.saver.check_disk()
        folder = loadable(start, staging=trainer.saver.staging, accelerator=trainer.accelerator)
        trainer.saver.start(lock=run.lock_descriptor)
        if args.sync_to and trainer.is_world_process_zero():
            run.write_environment(trainer.environment)  # with the run identity, which the copy needs
            trainer.saver.copier = RunCopier(run, args, trainer.environment.run_identity)
            if start.checkpoint is None:
                trainer.saver.copier.require_place()
        shard_by_fsdp(trainer.model, trainer.accelerator)
        trainer.watchdog.arm()
        gc.freeze()  # collections do not visit the objects that imports have created
        gc.set_threshold(700, 10, 10)  # Python's default, see cli.run
        trainer.train(resume_from_checkpoint=folder)
        with trainer.meter.on("saving"):
            trainer.saver.finish()
        trainer.guard.settle()

        # --- Final model, or an early stop
        step = trainer.state.global_step
        if when.reason is None and step < min(args.last_step, trainer.plan.max_steps):
            raise RunFailed(f"The training rows ended at step {step}.")
        if when.reason or step < trainer.plan.max_steps:
            # If the run had reached stop_at_step in an earlier attempt, no step sets a reason.
            when.reason = when.reason or f"--stop_at_step {args.stop_at_step}"
            trainer.record("failed" if when.orphaned else "stopped", reason=when.reason)
        else:
            with trainer.meter.on("saving"):
                _save_final(trainer)
        trainer.saver.finish_copies()
        trainer.watchdog.disarm()
        # If a rank exits while others still work, its sockets close, and gloo aborts at exit.
        trainer.accelerator.wait_for_everyone()
        trainer.accelerator.end_training()
        if trainer.is_world_process_zero():
            _report_end(trainer)
    except BaseException as error:
        reason = str(error) if isinstance(error, RunFailed) else f"{type(error).__name__}: {error}"
        trainer.record("diverged" if isinstance(error, Diverged) else "failed", reason=reason)
        trainer.saver.close()  # the writer still completes the last checkpoint
        if isinstance(error, Exception):
            trainer.saver.copy_rest(COPY_SECONDS)
        raise
    trainer.saver.close()
    if trainer.saver.copier:
        trainer.saver.copier.require_copied()


def _prepare_run_directory(trainer: PretrainingTrainer, start: Start) -> None:
    """Remove what an earlier attempt left after the step at which this one starts."""
    run = trainer.run
    checkpoints.sweep(run.path)
    for remark in start.remarks:
        logger.warning(remark)
    # Newer checkpoints are damaged, or the run goes back before them. Rotation would keep them as the newest and
    # delete complete ones.
    for path in checkpoints.set_aside(run.path, after=start.step):
        logger.info("Renamed a checkpoint to %s, because the run resumes from an earlier step.", path)
    if start.checkpoint is not None:
        logger.info("resuming from %s", start.checkpoint)
    run.rewind(start.step if start.checkpoint else -1, validates_again=trainer.args.eval_on_start)
    run.add_redone_steps(start.step, start.manifest.get("time_breakdown", {}))
    out_of_date = dict.fromkeys(run.status().losses)
    progress = {"max_steps": trainer.plan.max_steps, "step": start.step, "reason": None}
    run.write_status("running", **progress | out_of_date | events.validation_losses(run.metrics))


def _save_final(trainer: PretrainingTrainer) -> None:
    """Write final/, and mark the run as complete.

    final/ has the fp32 weights, or their average over steps if the run computes one.
    """
    main = trainer.is_world_process_zero()
    with trainer.average.applied() if trainer.average.exists else contextlib.nullcontext():
        weights = fp32_weights(trainer.model, keep=main)
    if not main:
        trainer.saver.wait_for(trainer.run.final)
        return
    trainer.record("running")
    build_whole()
    run, model = trainer.run, plain_model(trainer.model.config, weights)
    staged = run.path / STAGING
    with checkpoints.disk_faults_in_words(run.path, run.final.name, staged):
        shutil.rmtree(staged, ignore_errors=True)
        with hashed_saves(staged, None, trainer.watchdog.arm) as files:
            model.save_pretrained(staged)
        tokenization.save(trainer.processing_class, staged)
        step = trainer.state.global_step
        measured, prefix = events.validation_losses(run.metrics, step), AVERAGED if trainer.average.exists else "eval"
        finite = {key: loss for key, loss in measured.items() if key.startswith(prefix) and loss is not None}
        losses = {key.replace(AVERAGED, "eval"): loss for key, loss in finite.items()}
        facts = {"step": step, "tokens": trainer.tokens_trained, "losses": losses}
        checkpoints.seal(staged, files, **facts, environment=trainer.environment.to_json())
        record = TrainingRecord(**facts, environment=trainer.environment)
        # The model card is not in the manifest.
        write_whole(staged / "README.md", model_card(run.path.resolve().name, record))
        sync(staged)
    checkpoints.publish(staged, run.final)
    trainer.record("complete", reason=None)
    logger.info("The run is complete. The final model is in %s.", run.final)


def _report_end(trainer: PretrainingTrainer) -> None:
    """Log whether the loss is in the range of llm.c's runs, the time by activity, and how to continue."""
    losses, reference = trainer.eval_losses, trainer.environment.reference
    if reference and "eval_loss" in losses and (message := explained(int(losses["step"]), losses["eval_loss"])):
        logger.info(message)
    table = breakdown(trainer.run.time_breakdown(), usd_per_hour=trainer.args.usd_per_hour)
    logger.info("time of the run by activity:\n  %s", "\n  ".join(table.lines()[1:]))
    if reason := trainer.when.reason:
        option = reason.partition(" ")[0] if reason.startswith("--") else ""
        why, fix = (f", because of {reason}", f"with a larger {option}") if option else ("", "again")
        logger.info("Stopped at step %d%s. Run the command %s to continue.", trainer.state.global_step, why, fix)
