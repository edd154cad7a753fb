"""The life of a run: check the settings, choose the start, build, train, and end."""

import contextlib
import gc
import logging
import os
import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING

from gpt2_repro import ranks
from gpt2_repro.checkpoints import conversion
from gpt2_repro.checkpoints.copying import RunCopier
from gpt2_repro.checkpoints.manifest import read_manifest, seal
from gpt2_repro.checkpoints.restoring import restore_copies
from gpt2_repro.checkpoints.resuming import Start, choose_start, folder_to_load, prepare_run_directory
from gpt2_repro.checkpoints.rotation import delete_tree, disk_faults_in_words, leftovers, publish, sweep
from gpt2_repro.console import console
from gpt2_repro.data.prepared import PreparedData
from gpt2_repro.errors import Diverged, RunFailed, raised_at
from gpt2_repro.files import size_of, sync, write_whole
from gpt2_repro.launchers import deepspeed_json
from gpt2_repro.model.checkpoint import resolve_checkpoint
from gpt2_repro.recipe import TrainingRecipe
from gpt2_repro.run_record import RunRecord, events
from gpt2_repro.run_record.environment import TrainingRecord
from gpt2_repro.run_record.layout import CONSOLE, SHARED
from gpt2_repro.run_record.notes import RUN, WENT_BACK, note
from gpt2_repro.training.settings import (
    RunSetup,
    resolve_settings,
    run_identity_of,
    settings_from,
    to_training_arguments,
)


if TYPE_CHECKING:  # imports of several seconds
    from gpt2_repro.training.trainer import PretrainingTrainer

logger = logging.getLogger(__name__)

COPY_SECONDS = 120.0  # longest time to copy a run that has failed


def train(recipe: TrainingRecipe, data: PreparedData) -> None:
    """Start or resume the run of a recipe. A finished run is not changed.

    This is a collective: call it on all ranks.

    Args:
        recipe: a recipe whose model and batch sizes are set (not 0), see `sizing.follow_data`.

    Raises UserError for wrong settings, before the model is built. Raises RunFailed if the run fails.
    """
    # --- Settings and checks, before processes are joined and the model is built
    settings, plan = resolve_settings(recipe)
    data.check()
    run = RunRecord(str(settings.output_dir))
    identity = run_identity_of(settings, plan, data=data.manifest, model=recipe.model)
    setup = RunSetup(recipe, settings, plan, data, run, identity)

    with run.unchanged_until_claimed():
        # --- Where to start
        start = ranks.decide(lambda: find_start(setup))
        run.end_phase("data and checkpoints")
        if start.is_finished:
            return copy_again(setup)

        # --- Build
        trainer = prepare_trainer(setup, start)

        # --- Train, and write the final model
        with lifecycle(trainer, setup, start) as checkpoint:
            trainer.train(resume_from_checkpoint=checkpoint)
            trainer.settle()
            if trainer.when.reason is None:
                save_final(trainer)
            else:
                state = "failed" if trainer.when.orphaned else "stopped"
                trainer.record(state, reason=trainer.when.reason)


def find_start(setup: RunSetup) -> Start:
    """Restore a copy of the run if this machine has an older one or none, and choose the checkpoint to start from.

    Call this on rank 0 only.
    """
    settings = setup.settings
    restored = None
    if settings.sync_from or settings.sync_to:
        restored = restore_copies(setup.run, setup.identity, sync_from=settings.sync_from, sync_to=settings.sync_to)
    start = choose_start(
        setup.run,
        setup.identity,
        max_steps=setup.plan.max_steps,
        resume_from=settings.resume_from,
        verified=restored,
    )
    init_from = setup.recipe.model.init_from
    if init_from and start.checkpoint is None and not start.is_finished:
        resolve_checkpoint(init_from)  # an error if it does not exist
    return start


def prepare_trainer(setup: RunSetup, start: Start) -> "PretrainingTrainer":
    """Start the process group, check that all ranks have the same settings, and build the Trainer. A collective."""
    from gpt2_repro.training.build import build_trainer

    gc.freeze()  # collections do not visit the objects of imports; after the model is built, it would never be freed
    args = to_training_arguments(settings_from(setup.settings, start), setup.plan)  # starts the process group
    setup.run.end_phase("imports")
    json = deepspeed_json()
    ranks.check_equal(
        {
            **setup.identity.values,
            "plan": setup.plan,
            "eval_tokens": setup.settings.eval_tokens,
            "data": setup.data.manifest.sha256,
            "DeepSpeed JSON": None if json is None else json.read_bytes(),
        }
    )
    trainer = build_trainer(args, setup, start)
    setup.run.end_phase("model")
    return trainer


def copy_again(setup: RunSetup) -> None:
    """Copy what --sync_to lacks of a run that is already complete."""
    run = setup.run
    sync_to = setup.settings.sync_to
    note(RUN, str(run.path.resolve()))
    if ranks.is_main():
        if run.status().state != "complete":
            run.write_status("complete", reason=None)
        if sync_to:
            copier = RunCopier(run, sync_to, setup.settings.rotation, setup.identity)
            list(copier.finish())
            copier.require_copied()
    logger.info("%s is already complete: %s. To train again, pass a new --output_dir.", run.path, run.final)


@contextlib.contextmanager
def lifecycle(trainer: "PretrainingTrainer", setup: RunSetup, start: Start) -> Iterator[str | None]:
    """Prepare the training, yield the folder for Trainer to load, and record how the run ends. A collective.

    Raises UserError, before `claim`, if the run cannot start. Raises RunFailed if the run fails, or if it is not copied
    to --sync_to.
    """
    from gpt2_repro.training.announce import report_end
    from gpt2_repro.training.engine import load_universal_form
    from gpt2_repro.training.sharded import shard_by_fsdp
    from gpt2_repro.training.tracking import finish_reporting

    run = trainer.run
    saver = trainer.saver
    trainer.when.signals.install()
    trainer.restore(start)
    require_shared(run)
    require_space(trainer, start)
    has_ended = False

    def record_hang(reason: str) -> None:
        if not has_ended:
            record_failure(trainer, "failed", reason)

    try:
        claim(trainer, setup, start)
        folder = folder_to_load(start, staging=saver.staging, processes=trainer.args.world_size)
        if start.needs_conversion(trainer.args.world_size):
            load_universal_form(trainer.accelerator)
        saver.start(trainer.environment, is_new=start.checkpoint is None)
        if trainer.is_fsdp_enabled:
            shard_by_fsdp(trainer.model, trainer.accelerator)
        trainer.watchdog.record_with(record_hang)
        trainer.watchdog.arm()
        yield folder
        has_ended = True  # and its state is recorded
        saver.finish_copies()
        finish_reporting(trainer)
        trainer.watchdog.disarm()
        # If a rank exits while others still work, its sockets close, and gloo aborts at exit.
        trainer.accelerator.wait_for_everyone()
        trainer.accelerator.end_training()
        if ranks.is_main():
            report_end(trainer)
    except BaseException as error:
        if not has_ended:
            reason = str(error)
            if not isinstance(error, RunFailed):
                reason = f"{type(error).__name__} in {raised_at(error)}: {error}"
            state = "failed"
            if isinstance(error, Diverged):
                state = "diverged"
            record_failure(trainer, state, reason)
        saver.close()  # the writer still completes the last checkpoint
        if isinstance(error, Exception):
            saver.copy_rest(COPY_SECONDS)
        raise
    saver.close()
    saver.require_copied()


def record_failure(trainer: "PretrainingTrainer", state: str, reason: str) -> None:
    """Record that this rank has failed. Each machine does this, because that of rank 0 may be lost.

    A run that is not claimed can belong to another job, and is not changed.
    """
    if not trainer.run.is_claimed:
        return
    if ranks.is_main():
        trainer.record(state, reason=reason)
    elif trainer.args.local_process_index == 0 and ranks.on_this_machine() < ranks.count():
        trainer.run.replace_running(state, reason)


def require_shared(run: RunRecord) -> None:
    """Raise UserError if the machines of this run do not share its run directory. A collective."""
    if os.environ.get("LOCAL_WORLD_SIZE", "1") == os.environ.get("WORLD_SIZE", "1"):
        return
    mark = run.path / SHARED
    if ranks.is_main():
        write_whole(mark, uuid.uuid4().hex)
    try:
        ranks.check_shared(mark)
    finally:
        if ranks.is_main():
            mark.unlink(missing_ok=True)


def require_space(trainer: "PretrainingTrainer", start: Start) -> None:
    """Raise UserError if the disk has too little space for a checkpoint or for a conversion. A collective."""
    trainer.saver.check_disk(resumes_at=start.step)

    def check_conversion() -> None:
        if start.checkpoint is None or not start.needs_conversion(trainer.args.world_size):
            return
        deleted = leftovers(trainer.run.path)  # before the conversion
        conversion.require_space(start.checkpoint, reclaimable=sum(size_of(folder) for folder in deleted))

    ranks.decide(check_conversion)


def claim(trainer: "PretrainingTrainer", setup: RunSetup, start: Start) -> None:
    """Record that this process trains the run, and remove what earlier attempts left. A collective.

    A start that is refused has ended before. Until here, only a newer copy of the same run was restored.
    """
    from gpt2_repro.training.tracking import record_tracking

    run = trainer.run
    args = trainer.args
    if ranks.is_main():
        # Not for a run of the stored recipe.
        stored = setup.recipe.with_training(output_dir=args.output_dir, resume_from="", sync_to="", sync_from="")
        run.claim(stored.to_yaml())
        record_tracking(args.report_to, run.path)
        prepare_run_directory(run, start, max_steps=trainer.plan.max_steps, validates_again=args.eval_on_start)
    ranks.wait()  # until rank 0 has claimed the run
    run.join()
    console.open(run.path / CONSOLE)
    if args.local_process_index == 0:
        note(RUN, str(run.path.resolve()))
        if args.settings.resume_from:
            note(WENT_BACK, args.settings.resume_from)


def save_final(trainer: "PretrainingTrainer") -> None:
    """Write final/, and mark the run as complete. A collective.

    final/ has the fp32 weights, or their average over steps if the run computes one.
    """
    from gpt2_repro import tokenization
    from gpt2_repro.evaluation.model_card import model_card
    from gpt2_repro.model.pretraining import plain_model, save_plain
    from gpt2_repro.training.engine import fp32_weights
    from gpt2_repro.training.sharded import build_whole

    run = trainer.run
    saver = trainer.saver
    step = trainer.state.global_step
    is_averaged = trainer.average.exists
    with trainer.meter.on("saving"):
        if is_averaged:
            with trainer.average.applied():
                weights = fp32_weights(trainer.model, keep=ranks.is_main())
        else:
            weights = fp32_weights(trainer.model, keep=ranks.is_main())
        if not ranks.is_main():
            # Before a run was extended, it had another final/.
            return saver.wait_until(lambda: read_manifest(run.final).get("step") == step)
        trainer.record("running")
        build_whole()
        staged = saver.staging / run.final.name  # the staging folder may have files that cannot be deleted
        with disk_faults_in_words(run.path, run.final.name, saver.staging):
            sweep(run.path)
            save_plain(plain_model(trainer.model.config, weights), staged)
            trainer.watchdog.arm()
            tokenization.save(trainer.processing_class, staged)
            record = TrainingRecord(
                step=step,
                tokens=trainer.tokens_trained,
                losses=events.model_losses(run.metrics, step, averaged=is_averaged),
                environment=trainer.environment,
                averaged=is_averaged,
            )
            seal(
                staged,
                {},
                step=record.step,
                tokens=record.tokens,
                losses=record.losses,
                environment=record.environment.to_json(),
                averaged=record.averaged,
            )
            # The model card is not in the manifest.
            card = model_card(run.path.resolve().name, record)
            write_whole(staged / "README.md", card)
            sync(staged)
        publish(staged, run.final)
        delete_tree(saver.staging)
        trainer.record("complete", reason=None)
    logger.info("The run is complete. The final model is in %s.", run.final)
