"""A run from its start to its last step, or to where it is told to stop: what is recorded of it, however it ends."""

import logging
from typing import Any

from gpt2_repro.errors import Diverged, RunFailed
from gpt2_repro.references import explained
from gpt2_repro.run_record import checkpoints
from gpt2_repro.supervision import RUN, WENT_BACK, note
from gpt2_repro.time_breakdown import breakdown_lines
from gpt2_repro.training.final import finish
from gpt2_repro.training.resharding import loadable
from gpt2_repro.training.resuming import Start
from gpt2_repro.training.sharding import shard_by_fsdp
from gpt2_repro.training.trainer import PretrainingTrainer


logger = logging.getLogger(__name__)


def fit(trainer: PretrainingTrainer, start: Start) -> None:
    """Train from `start` to the last step and write final/, or until a signal, a budget or stop_at_step, on all ranks.

    Raises RunFailed where the disk is full or updates are not finite.
    """
    run, args = trainer.run, trainer.args
    trainer.stopping.signals.install()
    if start.checkpoint is not None:
        trainer.restore(start)
    if trainer.is_world_process_zero():
        checkpoints.sweep(run.path)
        # What is newer is damaged, or was gone back behind: as the newest it would push complete ones out.
        _announce(start, checkpoints.set_aside(run.path, after=start.step))
        run.rewind(start.step if start.checkpoint else -1, validates_again=args.eval_on_start)
        run.add_redone_steps(start.step, start.manifest.get("time_breakdown", {}))
        out_of_date = dict.fromkeys(run.status().losses)
        told = {"max_steps": trainer.plan.max_steps, "step": start.step, "reason": None}
        run.write_status("running", **told | out_of_date | run.validation_losses())
    if args.local_process_index == 0:
        note(RUN, str(run.path.resolve()))
        if args.resume_from:
            note(WENT_BACK, args.resume_from)
    processes, staging = args.world_size, trainer.saver.staging
    try:
        folder = loadable(start, staging=staging, processes=processes, accelerator=trainer.accelerator)
        shard_by_fsdp(trainer.model, trainer.accelerator)
        trainer.watchdog.arm()
        trainer.train(resume_from_checkpoint=folder)
        trainer.guard.settle()
        stopping = trainer.stopping
        if stopping.stops or trainer.state.global_step < trainer.plan.max_steps:
            # Where the run was at stop_at_step before, no step has told so.
            reason = stopping.reason or f"--stop_at_step {args.stop_at_step}"
            trainer.record("failed" if stopping.orphaned else "stopped", reason=reason)
        finish(trainer)
        judge(trainer)
        if trainer.is_world_process_zero():
            lines = breakdown_lines(run.time_breakdown(), usd_per_hour=args.usd_per_hour)
            logger.info("where the minutes went:\n  %s", "\n  ".join(lines))
    except BaseException as error:
        reason = str(error) if isinstance(error, RunFailed) else f"{type(error).__name__}: {error}"
        trainer.record("diverged" if isinstance(error, Diverged) else "failed", reason=reason)
        raise


def judge(trainer: PretrainingTrainer) -> None:
    """Say whether the run has come out where those that it follows did."""
    losses, followed = trainer.eval_losses, trainer.environment.reference
    told = followed and "eval_loss" in losses and explained(int(losses["step"]), losses["eval_loss"])
    if told and trainer.is_world_process_zero():
        logger.info(told)


def _announce(start: Start, aside: list[Any]) -> None:
    for line in start.remarks:
        logger.warning(line)
    for path in aside:
        logger.info("set aside: %s", path)
    if start.checkpoint is not None:
        logger.info("resuming from %s", start.checkpoint)
