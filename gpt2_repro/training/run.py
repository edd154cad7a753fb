"""The story of a run: check, choose where to start, build, train, and write the final model."""

import contextlib
import dataclasses
import functools
import gc
import logging
import os
import shutil
from typing import TYPE_CHECKING, Any

from gpt2_repro.config import values_of
from gpt2_repro.data.prepared import PreparedData
from gpt2_repro.errors import Diverged, RunFailed, UserError
from gpt2_repro.files import sync, write_whole
from gpt2_repro.hardware import find_accelerator
from gpt2_repro.launchers import deepspeed_json
from gpt2_repro.run_record import RunRecord, checkpoints, events
from gpt2_repro.run_record.checkpoint import resolve_checkpoint
from gpt2_repro.run_record.environment import TrainingRecord
from gpt2_repro.run_record.layout import STAGING, STATUS
from gpt2_repro.run_record.supervision import RUN, WENT_BACK, note
from gpt2_repro.run_record.time_breakdown import breakdown_lines
from gpt2_repro.training.arguments import TrainingRecipe
from gpt2_repro.training.copying import RunCopier
from gpt2_repro.training.resuming import NEWER, Start, choose_start, run_identity_of
from gpt2_repro.training.settings import resolve_settings, to_training_arguments


if TYPE_CHECKING:
    from gpt2_repro.training.trainer import PretrainingTrainer

logger = logging.getLogger(__name__)


def train(recipe: TrainingRecipe, data: PreparedData, *, deviations: dict[str, Any]) -> None:
    """Start or resume the run of a recipe. A finished run is not changed.

    This is a collective: call it on all ranks.

    Args:
        recipe: a recipe whose model and batch sizes are set (not 0), see `sizing.follow_data`.
        deviations: the result of `deviations.compare_with_default`, to be written to environment.json.

    Raises UserError for wrong settings, before the model is built. Raises RunFailed if the run fails.
    """
    # --- Settings and checks, before torch is imported
    manifest, model_section = data.manifest, recipe.model
    settings, plan = resolve_settings(recipe)
    run = RunRecord(str(settings.output_dir))
    data.check_tokenizer()
    for split in manifest.shards:
        data.check_shards(split)
    identity = run_identity_of(settings, plan, data=manifest, model=values_of(model_section))

    # --- Where to start: rank 0 decides, because other machines may see an older state of the file system
    start: Start | UserError | None = None
    if os.environ.get("RANK", "0") == "0":
        try:
            start = choose_start(run, settings, plan, identity)
            if model_section.init_from and not start.checkpoint and not start.is_finished:
                resolve_checkpoint(model_section.init_from)
        except UserError as error:
            # The launcher ends the processes of its own machine only. The others would wait for rank 0.
            if os.environ.get("LOCAL_WORLD_SIZE", "1") == os.environ.get("WORLD_SIZE", "1"):
                raise
            start = error
    args = to_training_arguments(settings, plan)  # starts the process group

    from accelerate.utils import broadcast_object_list
    from transformers import set_seed

    from gpt2_repro.model.architecture import check_architecture
    from gpt2_repro.model.attention import Machine, choose_attention
    from gpt2_repro.model.build import build_model
    from gpt2_repro.model.configuration import build_config
    from gpt2_repro.model.document_mask import documents_of
    from gpt2_repro.training import ranks
    from gpt2_repro.training.announce import announce, describe_run
    from gpt2_repro.training.inputs import open_inputs
    from gpt2_repro.training.tracking import prepare_tracking
    from gpt2_repro.training.trainer import PretrainingTrainer
    from gpt2_repro.training.when import validates_at_start

    zero_config = deepspeed_json()
    further = {"plan": plan, "eval_tokens": settings.eval_tokens}
    further |= {"DeepSpeed JSON": zero_config and zero_config.read_bytes()}
    (start,) = broadcast_object_list([start])
    if isinstance(start, UserError):
        raise start
    ranks.check_equal(NEWER | identity | further | {"data": manifest.sha256})
    if start.is_finished:
        note(RUN, str(run.path.resolve()))
        if args.process_index == 0:
            if run.status().state != "complete":
                run.write_status("complete", reason=None)
            if settings.sync_to:
                copier = RunCopier(run, settings)
                for _ in copier.finish():
                    pass
                copier.require_copied()
        return logger.info("%s is already complete: %s. To train again, pass a new --output_dir.", run.path, run.final)
    plan, identity = start.plan, identity | {"extensions": start.extensions}
    args.max_steps = plan.max_steps
    args.eval_on_start = validates_at_start(args, start.step, is_validated=start.is_validated)

    # --- Data and model
    inputs = open_inputs(data, args)
    shape = {"sequence_length": plan.sequence_length, "vocab_size": manifest.vocab_size}
    config = build_config(model_section, **shape, tokenizer=inputs.tokenizer)
    check_architecture(config)
    machine = Machine(
        cuda=not args.use_cpu,
        bf16=args.bf16,
        length=plan.sequence_length,
        one_row_compiled=args.compiles_one_row,
        document_mask=model_section.document_mask,
    )
    requested, attention = model_section.attn_implementation, None
    if requested != "auto" or args.process_index == 0:
        earlier = _attention_of(run, use_cpu=args.use_cpu)
        attention = choose_attention(requested, machine, config, rows=plan.micro_batch_size, earlier=earlier)
    attention = broadcast_object_list([attention])[0]  # timings differ between ranks, so rank 0 decides
    set_seed(args.seed)
    model = build_model(
        config,
        inputs.tokenizer,
        attention=attention.name,
        init_from="" if start.checkpoint else model_section.init_from,
        documents=documents_of(inputs.tokenizer, recipe.data.separator) if model_section.document_mask else None,
        compiled=args.compile_loss,
    )

    # --- Trainer
    if args.process_index == 0:
        elsewhere: Any = {"resume_from": "", "sync_to": "", "sync_from": ""}  # not for a run of the stored recipe
        training = dataclasses.replace(recipe.training, output_dir=args.output_dir, **elsewhere)
        run.claim(dataclasses.replace(recipe, training=training).to_yaml())
    chosen = {"attention": str(attention), "run_identity": identity}
    environment = announce(describe_run(args, plan, model, manifest, **chosen, **deviations))
    prepare_tracking(args.report_to, run.path)  # before the Trainer imports wandb
    trainer = PretrainingTrainer(model=model, args=args, inputs=inputs, run=run, environment=environment)
    trainer.when.signals.install()
    add_callbacks(trainer)
    return fit(trainer, start)


def _attention_of(run: RunRecord, *, use_cpu: bool) -> str:
    """Return the kernel of the run's previous attempt, or "" if unknown or on another type of GPU."""
    earlier = run.environment()
    if earlier.accelerator.name != find_accelerator(use_cpu=use_cpu).name:
        return ""
    return earlier.engine.get("attention") or (earlier.attention or "").partition(" ")[0]


def add_callbacks(trainer: "PretrainingTrainer") -> None:
    """Add callbacks that print progress, generate samples and check the compilation.

    Exceptions in callbacks that report to tracking services are caught from now on.
    """
    from transformers import PrinterCallback
    from transformers.trainer import DEFAULT_PROGRESS_CALLBACK
    from transformers.utils.logging import disable_progress_bar

    from gpt2_repro.training.callbacks import CompilationReport, ProgressBar
    from gpt2_repro.training.samples import TextSampler
    from gpt2_repro.training.tracking import Guarded, guard_reporting, report_text

    guard_reporting(trainer)
    disable_progress_bar()  # each save would draw a bar over the progress bar of the run
    for stock in (DEFAULT_PROGRESS_CALLBACK, PrinterCallback):
        trainer.remove_callback(stock)
    trainer.add_callback(ProgressBar(trainer.validation.batches, trainer.environment.reference))
    report = functools.partial(report_text, trainer)
    sampler = TextSampler(trainer.run, trainer.processing_class, due=trainer.when.samples, report=report)
    trainer.callback_handler.callbacks.append(Guarded(sampler))  # add_callback warns of a second Guarded
    if trainer.args.compile_loss:
        trainer.add_callback(CompilationReport(trainer.model, record=trainer.record_engine))


def fit(trainer: "PretrainingTrainer", start: Start) -> None:
    """Train to the last step and write the final model to final/.

    This is a collective: call it on all ranks. If the training stops early, final/ is not written.

    Raises RunFailed if the disk is full or too many updates are not finite.
    """
    from gpt2_repro.training import ranks
    from gpt2_repro.training.resuming import loadable
    from gpt2_repro.training.sharded import shard_by_fsdp

    run, args, when = trainer.run, trainer.args, trainer.when
    if start.checkpoint is not None:
        trainer.restore(start.manifest, step=start.step)
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
        trainer.start_writer()
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
        raise
    finally:
        trainer.saver.close()  # after a crash, the writer still completes the last checkpoint
    if trainer.saver.copier:
        trainer.saver.copier.require_copied()


def _prepare_run_directory(trainer: "PretrainingTrainer", start: Start) -> None:
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


def _save_final(trainer: "PretrainingTrainer") -> None:
    """Write final/, and mark the run as complete.

    final/ has the fp32 weights, or their average over steps if the run computes one.
    """
    from gpt2_repro import tokenization
    from gpt2_repro.evaluation.model_card import model_card
    from gpt2_repro.model.pretraining import plain_model
    from gpt2_repro.training.engine import fp32_weights
    from gpt2_repro.training.sharded import build_whole
    from gpt2_repro.training.trainer import hashed_saves
    from gpt2_repro.training.validation import AVERAGED

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
        losses = {key: loss for key, loss in events.validation_losses(run.metrics, step).items() if loss is not None}
        if trainer.average.exists:
            averaged = {key: loss for key, loss in losses.items() if key.startswith(AVERAGED)}
            losses = {key.replace(AVERAGED, "eval"): loss for key, loss in averaged.items()}
        facts = {"step": step, "tokens": trainer.tokens_trained, "losses": losses}
        checkpoints.seal(staged, files, **facts, environment=trainer.environment.to_json())
        record = TrainingRecord(**facts, environment=trainer.environment)
        # The model card is not in the manifest.
        write_whole(staged / "README.md", model_card(run.path.resolve().name, record))
        sync(staged)
    checkpoints.publish(staged, run.final)
    trainer.record("complete", reason=None)
    logger.info("The run is complete. The final model is in %s.", run.final)


def _report_end(trainer: "PretrainingTrainer") -> None:
    """Log whether the loss is in the range of llm.c's runs, the time by activity, and how to continue."""
    from gpt2_repro.evaluation.references import explained

    losses, reference = trainer.eval_losses, trainer.environment.reference
    if reference and "eval_loss" in losses and (message := explained(int(losses["step"]), losses["eval_loss"])):
        logger.info(message)
    lines = breakdown_lines(trainer.run.time_breakdown(), usd_per_hour=trainer.args.usd_per_hour)
    logger.info("time of the run by activity:\n  %s", "\n  ".join(lines))
    if reason := trainer.when.reason:
        option = reason.partition(" ")[0] if reason.startswith("--") else ""
        why, fix = (f", because of {reason}", f"with a larger {option}") if option else ("", "again")
        logger.info("Stopped at step %d%s. Run the command %s to continue.", trainer.state.global_step, why, fix)
