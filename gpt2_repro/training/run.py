"""The life of a run: check the settings, choose the start, build, train, and end."""

import contextlib
import functools
import gc
import logging
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from gpt2_repro import ranks
from gpt2_repro.batch_plan import BatchPlan
from gpt2_repro.checkpoints import conversion
from gpt2_repro.checkpoints.copying import RunCopier
from gpt2_repro.checkpoints.manifest import seal
from gpt2_repro.checkpoints.restoring import restore_copies
from gpt2_repro.checkpoints.resuming import RunIdentity, Start, choose_start, loadable, prepare_run_directory
from gpt2_repro.checkpoints.rotation import delete_tree, disk_faults_in_words, leftovers, publish, sweep
from gpt2_repro.data.prepared import PreparedData
from gpt2_repro.errors import Diverged, RunFailed
from gpt2_repro.files import size_of, sync, write_whole
from gpt2_repro.launchers import deepspeed_json
from gpt2_repro.model.checkpoint import resolve_checkpoint
from gpt2_repro.recipe import TrainingRecipe, TrainingSection
from gpt2_repro.run_record import RunRecord, events
from gpt2_repro.run_record.environment import TrainingRecord
from gpt2_repro.run_record.layout import SHARED
from gpt2_repro.run_record.notes import RUN, WENT_BACK, note
from gpt2_repro.training.settings import resolve_settings, run_identity_of, settings_from, to_training_arguments


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
    # --- Settings and checks, before torch is imported
    settings, plan = resolve_settings(recipe)
    run = RunRecord(str(settings.output_dir))
    with run.unchanged_until_claimed():
        start_and_train(recipe, data, settings, plan, run)


def start_and_train(
    recipe: TrainingRecipe, data: PreparedData, settings: TrainingSection, plan: BatchPlan, run: RunRecord
) -> None:
    """Choose where to start, build the Trainer, train, and write the final model. A collective."""
    run.end_phase("settings")
    data.check()
    identity = run_identity_of(settings, plan, data=data.manifest, model=recipe.model)

    # --- Where to start
    def restore_and_choose() -> Start:
        copied = restore_copies(run, identity, sync_from=settings.sync_from, sync_to=settings.sync_to)
        start = choose_start(
            run,
            identity,
            max_steps=plan.max_steps,
            resume_from=settings.resume_from,
            verified=copied,
            meanwhile=functools.partial(import_build, run),
        )
        is_new = start.checkpoint is None and not start.is_finished
        if is_new and recipe.model.init_from:
            resolve_checkpoint(recipe.model.init_from)  # an error if it does not exist
        return start

    if not ranks.is_main() and run.status().state != "complete":
        import_build(run)  # instead of waiting for rank 0
    start = ranks.decide(restore_and_choose)
    run.end_phase("data and checkpoints")
    if start.is_finished:
        return copy_again(run, settings, identity)

    # --- Build
    from gpt2_repro.training.build import build_trainer

    args = to_training_arguments(settings_from(settings, start), plan)  # starts the process group
    run.end_phase("imports")
    json = deepspeed_json()
    further = {"plan": plan, "eval_tokens": settings.eval_tokens, "data": data.manifest.sha256}
    ranks.check_equal({**identity.values, **further} | {"DeepSpeed JSON": json and json.read_bytes()})
    trainer = build_trainer(args, recipe, plan, data, run, start, identity)

    # --- Train, and write the final model
    # Not for a run of the stored recipe.
    stored = recipe.with_training(output_dir=args.output_dir, resume_from="", sync_to="", sync_from="")
    with lifecycle(trainer, start, stored.to_yaml()) as checkpoint:
        trainer.train(resume_from_checkpoint=checkpoint)
        trainer.settle()
        if (reason := trainer.when.reason) is None:
            save_final(trainer)
        else:
            trainer.record("failed" if trainer.when.orphaned else "stopped", reason=reason)


def import_build(run: RunRecord) -> None:
    """Import build.py, without what transformers does twice or only for object detection: 0.5 of 2 s.

    transformers (5.23) reads 2,500 files to import `transformers`, and again to import `transformers.models`, because
    its cache has 128 entries for 450 folders. The first result is still in the cache, under another path.
    """
    from transformers import utils

    run.end_phase("data and checkpoints")
    models, read = Path(utils.__file__).parents[1] / "models", utils.import_utils.create_import_structure_from_path
    again = f"{models}/__init__.py"
    utils.import_utils.create_import_structure_from_path = lambda path: read(models if path == again else path)
    utils.is_scipy_available = lambda: False
    import gpt2_repro.training.build  # noqa: F401

    gc.freeze()  # collections do not visit the objects of imports. Here, because frozen garbage is never freed
    run.end_phase("imports")


def copy_again(run: RunRecord, settings: TrainingSection, identity: RunIdentity) -> None:
    """Copy what --sync_to lacks of a run that is already complete."""
    note(RUN, str(run.path.resolve()))
    if ranks.is_main():
        if run.status().state != "complete":
            run.write_status("complete", reason=None)
        if settings.sync_to:
            copier = RunCopier(run, settings.sync_to, settings.rotation, identity)
            list(copier.finish())
            copier.require_copied()
    logger.info("%s is already complete: %s. To train again, pass a new --output_dir.", run.path, run.final)


@contextlib.contextmanager
def lifecycle(trainer: "PretrainingTrainer", start: Start, recipe: str) -> Iterator[str | None]:
    """Prepare the training, yield the folder for Trainer to load, and record how the run ends.

    A collective. `recipe` is the text of the run's recipe.yaml.

    Raises UserError, before the run directory is changed, if the run cannot start. Raises RunFailed if the run fails,
    or if it is not copied to --sync_to.
    """
    from gpt2_repro.training.announce import report_end
    from gpt2_repro.training.sharded import shard_by_fsdp
    from gpt2_repro.training.tracking import finish_reporting

    run, saver = trainer.run, trainer.saver
    trainer.when.signals.install()
    trainer.restore(start)
    require_shared(run)
    require_space(trainer, start)
    try:
        claim(trainer, start, recipe)
        folder = loadable(start, staging=saver.staging, accelerator=trainer.accelerator)
        saver.start(trainer.environment, is_new=start.checkpoint is None)
        shard_by_fsdp(trainer.model, trainer.accelerator)
        trainer.watchdog.arm()
        gc.set_threshold(700, 10, 10)  # Python's default, see cli.run
        run.end_phase("building the Trainer")
        yield folder
        saver.finish_copies()
        finish_reporting(trainer)
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


def claim(trainer: "PretrainingTrainer", start: Start, recipe: str) -> None:
    """Record that this process trains the run, and remove what earlier attempts left. A collective.

    This is the first change of the run directory. A start that is refused has ended before.
    """
    from gpt2_repro.training.tracking import record_tracking

    run, args = trainer.run, trainer.args
    if ranks.is_main():
        run.claim(recipe)
        record_tracking(args.report_to, run.path)
        prepare_run_directory(run, start, max_steps=trainer.plan.max_steps, validates_again=args.eval_on_start)
    ranks.largest(0)  # wait for rank 0
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

    run, saver, is_averaged = trainer.run, trainer.saver, trainer.average.exists
    with trainer.meter.on("saving"):
        with trainer.average.applied() if is_averaged else contextlib.nullcontext():
            weights = fp32_weights(trainer.model, keep=ranks.is_main())
        if not ranks.is_main():
            return saver.wait_for(run.final)
        trainer.record("running")
        build_whole()
        staged = saver.staging / run.final.name  # the staging folder may have files that cannot be deleted
        with disk_faults_in_words(run.path, run.final.name, saver.staging):
            sweep(run.path)
            save_plain(plain_model(trainer.model.config, weights), staged)
            trainer.watchdog.arm()
            tokenization.save(trainer.processing_class, staged)
            step = trainer.state.global_step
            losses = events.final_losses(run.metrics, step, averaged=is_averaged)
            tokens, environment = trainer.tokens_trained, trainer.environment
            seal(
                staged,
                {},
                step=step,
                tokens=tokens,
                losses=losses,
                environment=environment.to_json(),
                averaged=is_averaged,
            )
            # The model card is not in the manifest.
            record = TrainingRecord(step, tokens, losses, environment, averaged=is_averaged)
            card = model_card(run.path.resolve().name, record)
            write_whole(staged / "README.md", card)
            sync(staged)
        publish(staged, run.final)
        delete_tree(saver.staging)
        trainer.record("complete", reason=None)
    logger.info("The run is complete. The final model is in %s.", run.final)
