"""The last act of a run: `final/`, a plain Hugging Face folder with its model card."""

import logging
import shutil

from gpt2_repro.files import readable, sync, sync_folder
from gpt2_repro.model.pretraining import plain_model
from gpt2_repro.model_card import model_card
from gpt2_repro.run_record.checkpoints import discard, seal
from gpt2_repro.run_record.environment import TrainingRecord
from gpt2_repro.run_record.layout import STAGING
from gpt2_repro.training.engine import fp32_weights
from gpt2_repro.training.saving import full_disk_in_words
from gpt2_repro.training.sharding import build_whole
from gpt2_repro.training.trainer import PretrainingTrainer


logger = logging.getLogger(__name__)


def finish(trainer: PretrainingTrainer) -> None:
    """Write `final/` if the last step was reached, and let all ranks end together. Call it on all ranks."""
    if trainer.state.global_step >= trainer.plan.max_steps and not trainer.stopping.stops:
        with trainer.meter.on("saving"):
            _save_final(trainer)
    trainer.watchdog.disarm()
    # A rank that leaves while others still work takes its sockets along, and gloo then aborts at exit.
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()


def _save_final(trainer: PretrainingTrainer) -> None:
    """Write `final/` from the fp32 masters, whole or not at all, and call the run complete."""
    main = trainer.is_world_process_zero()
    weights = fp32_weights(trainer.model, keep=main)
    if not main:
        return
    trainer.record("running")
    build_whole()
    run, model = trainer.run, plain_model(trainer.model.config, weights)
    staged, final = run.path / STAGING, run.final
    with full_disk_in_words(run.path, run.final.name, staged):
        shutil.rmtree(staged, ignore_errors=True)
        model.save_pretrained(staged)
        readable(staged)
        trainer.processing_class.save_pretrained(staged)
        step = trainer.state.global_step
        facts = {"step": step, "tokens": trainer.tokens_trained, "losses": run.validation_losses(step)}
        seal(staged, {}, **facts, environment=trainer.environment.to_json())
        # Not in the manifest: an evaluation adds its results to the card.
        record = TrainingRecord(**facts, environment=trainer.environment)
        (staged / "README.md").write_text(model_card(run.path.resolve().name, record))
        sync_folder(staged)
    discard(final)
    staged.rename(final)
    sync(run.path)
    trainer.record("complete", reason=None)
    logger.info("complete: %s", final)
