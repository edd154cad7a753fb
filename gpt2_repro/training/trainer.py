"""The Trainer subclass: where pre-training departs from transformers' Trainer (5.23), each place with its reason.

- The schedule: HF's warm-up gives the first step a learning rate of 0 (optimization.py); llm.c's does not.
- Targets of a step: known without counting. Trainer counts them and gathers the counts of all processes in each step.
- The order of rows: a function of the seed, whole steps only. RandomSampler leaves a short last step in each epoch.
- Validation: exact sums over all processes. Trainer averages means of batches and counts padded duplicates.
- The log: reporting callbacks run before user callbacks, so metrics join in `log`. `total_flos` misses 40 % of GPT-2's.
- The save: staged, sealed and renamed. Trainer writes in place and resumes from whatever is newest.
"""

import contextlib
import functools
import io
import logging
import math
import shutil
import time
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from torch.optim.lr_scheduler import LambdaLR
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerControl

from gpt2_repro.compute import BatchPlan, learning_rate_factor
from gpt2_repro.data.collator import EpochSampler, collate_rows, pad_batch
from gpt2_repro.model.pretraining import IGNORED
from gpt2_repro.training import checkpoints
from gpt2_repro.training.arguments import PretrainingArguments
from gpt2_repro.training.compiled import CompilationReport
from gpt2_repro.training.engine import check_engine, describe_engine
from gpt2_repro.training.progress import ProgressBar
from gpt2_repro.training.run_directory import RunDirectory, refuse_another_run
from gpt2_repro.training.samples import TextSampler
from gpt2_repro.training.stopping import LastStep
from gpt2_repro.training.tracking import guard_reporting, prepare_wandb


logger = logging.getLogger(__name__)


class PretrainingTrainer(Trainer):
    """Trains by a BatchPlan and keeps the run directory.

    Args:
        plan: tokens, rows and steps.
        run: where metrics and checkpoints go.
        environment: what environment.json says; the engine's facts join it once there is an engine.
        trajectory: what a checkpoint must agree on to be resumed.
    """

    args: PretrainingArguments
    control: TrainerControl

    def __init__(
        self,
        *,
        plan: BatchPlan,
        run: RunDirectory,
        environment: dict[str, Any],
        trajectory: dict[str, Any],
        **kwargs: Any,
    ) -> None:
        prepare_wandb(kwargs["args"].report_to, run.path)
        super().__init__(data_collator=collate_rows, **kwargs)
        self.plan = plan
        self.sampler = EpochSampler(
            len(self.train_dataset),
            rows_per_step=plan.rows_per_step,
            seed=self.args.seed if self.args.data_seed is None else self.args.data_seed,
            shuffle=self.args.train_sampling_strategy == "random",
        )
        self.run = run
        self.environment = environment | {"trajectory": trajectory}
        self.trajectory = trajectory
        peak = environment["accelerator"]["peak_flops"]
        self.peak_flops = peak * plan.num_processes if peak and environment["precision"] == "bf16" else None
        self._staging = False
        # Seconds since the last line of the log: in validation and saving, and waiting for rows.
        self._paused = self._waited = 0.0
        self._logged_at: tuple[int, float] | None = None
        self._use_own_callbacks()

    def _use_own_callbacks(self) -> None:
        guard_reporting(self)
        for stock in (ProgressCallback, PrinterCallback):
            self.remove_callback(stock)
        rows = -(-len(self.eval_dataset) // self.args.world_size)
        self.add_callback(ProgressBar(eval_batches=-(-rows // self.args.per_device_eval_batch_size)))
        self.add_callback(
            TextSampler(
                self.run,
                self.processing_class,
                prompt=self.args.sample_prompt,
                num_tokens=self.args.sample_tokens,
            )
        )
        self.add_callback(LastStep(self.args.stop_at_step))
        if self.args.compile_loss:
            graphs, layers = self.model.compiled_graphs, self.model.config.num_hidden_layers
            self.add_callback(CompilationReport(graphs, n_layer=layers, record=self._record_engine))

    def fit(self) -> None:
        """Train from the newest complete checkpoint, or from the start, to the last step or to stop_at_step."""
        main = self.is_world_process_zero()
        found: list[Any] = [checkpoints.newest_complete(self.run.path) if main else None]
        checkpoint, skipped = broadcast_object_list(found)[0]
        for line in skipped if main else []:
            logger.warning(line)
        if checkpoint is not None:
            refuse_another_run(checkpoints.read_trajectory(checkpoint), self.trajectory, where=checkpoint)
            logger.info("resuming from %s", checkpoint)
            self.args.eval_on_start = False
        if main:
            self.run.rewind(-1 if checkpoint is None else checkpoints.step_of(checkpoint))
            self.run.write_status("running", max_steps=self.plan.max_steps, reason=None)
        # Time of earlier attempts counts: it was paid for.
        self._began = time.perf_counter() - self.run.read_status().get("seconds", 0.0)
        try:
            self.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        except BaseException as error:
            if main:
                state = "stopped" if isinstance(error, KeyboardInterrupt) else "failed"
                self.run.write_status(state, step=self.state.global_step, reason=f"{type(error).__name__}: {error}")
            raise
        if main:
            self._record("stopped")

    def _init_training_state(self, max_steps: int, *args: Any) -> Any:
        begun = super()._init_training_state(max_steps, *args)
        # Trainer would keep the intervals of the interrupted run, whatever is asked for now.
        self.state.compute_steps(self.args, max_steps)
        return begun

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        # DeepSpeed prints its memory use here, a dozen lines whatever the log level (runtime/bf16_optimizer.py, 0.19.8).
        with contextlib.redirect_stdout(io.StringIO()):
            prepared = super()._prepare_for_training(*args, **kwargs)
        engine = describe_engine(self.accelerator, self.model_wrapped, self.optimizer)
        check_engine(engine, self.plan, max_grad_norm=self.args.max_grad_norm, bf16=self.args.bf16)
        self._record_engine(engine | {"clip": self.args.max_grad_norm, "compiled": self.args.compile_loss})
        logger.info("engine: %s", ", ".join(f"{key} {value}" for key, value in self.environment["engine"].items()))
        return prepared

    def _record_engine(self, facts: dict[str, Any]) -> None:
        self.environment["engine"] = self.environment.get("engine", {}) | facts
        if self.is_world_process_zero():
            self.run.write_json("environment.json", self.environment)

    def _run_epoch(self, *args: Any, epoch: int, **kwargs: Any) -> None:
        # Trainer would train one step more when it resumes from the last checkpoint.
        if self.state.global_step >= (self.args.stop_at_step or self.plan.max_steps):
            self.control.should_training_stop = True
            return
        # On several processes neither accelerate nor Trainer tells a sampler of its epoch.
        self.sampler.set_epoch(epoch)
        super()._run_epoch(*args, epoch=epoch, **kwargs)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> LambdaLR:
        factor = functools.partial(
            learning_rate_factor,
            warmup_steps=int(self.args.warmup_steps),
            max_steps=num_training_steps,
            final_factor=self.args.final_learning_rate_fraction,
        )
        self.lr_scheduler = LambdaLR(optimizer or self.optimizer, factor)
        self._created_lr_scheduler = True
        return self.lr_scheduler

    def _get_train_sampler(self, train_dataset: Any = None) -> EpochSampler:
        return self.sampler

    def floating_point_ops(self, inputs: Any) -> int:
        return 0

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> int:
        return self.plan.tokens_per_step

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self._logged_at is None:
            self._logged_at = (self.state.global_step, time.perf_counter())
            self._paused = self._waited = 0.0
        return super().training_step(*args, **kwargs)

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return super().get_batch_samples(*args, **kwargs)
        finally:
            self._waited += time.perf_counter() - began

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add tokens, speed and MFU, write the line to metrics.jsonl, then report as Trainer does."""
        step = self.state.global_step
        if "loss" in logs and self._logged_at is not None:
            since, began = self._logged_at
            seconds = time.perf_counter() - began - self._paused
            speed = (step - since) * self.plan.tokens_per_step / seconds
            logs |= {"tokens": step * self.plan.tokens_per_step, "tokens_per_second": round(speed, 1)}
            logs["data_wait"] = round(self._waited / seconds, 4)  # share of the time, not a number of seconds
            if self.peak_flops:
                logs["mfu"] = round(speed * self.environment["flops_per_token"] / self.peak_flops, 4)
            self._logged_at, self._paused, self._waited = (step, time.perf_counter()), 0.0, 0.0
        if self.is_world_process_zero() and ("loss" in logs or "eval_loss" in logs):
            self.run.append("metrics.jsonl", {"step": step, **logs, "time": round(time.time(), 3)})
        super().log(logs, start_time)

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Mean negative log-likelihood per target of the validation rows, exact for any number of processes."""
        began = time.perf_counter()
        rows = self.eval_dataset if eval_dataset is None else eval_dataset
        model = self.model.eval()
        total = torch.zeros(2, dtype=torch.float64, device=self.args.device)
        mine = range(self.args.process_index, len(rows), self.args.world_size)
        size = self.args.per_device_eval_batch_size
        with torch.no_grad():
            for start in range(0, len(mine), size):
                picked = rows[list(mine[start : start + size])]["input_ids"]
                batch = self.data_collator([{"input_ids": row} for row in picked])
                targets = int((batch["labels"] != IGNORED).sum())
                if self.args.compile_loss:  # a shorter last batch would be compiled anew
                    batch = pad_batch(batch, rows=size)
                batch = self._prepare_inputs(batch)
                # Sums stay on the device: asking for each would make the host wait for each.
                total[0] += model(**batch, num_items_in_batch=1).loss.double()
                total[1] += targets
                self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)
        total = self.accelerator.reduce(total, reduction="sum")
        loss = (total[0] / total[1]).item()
        if not math.isfinite(loss):
            logger.warning("the validation loss is not finite at step %d", self.state.global_step)
        metrics = {
            f"{metric_key_prefix}_loss": loss,
            f"{metric_key_prefix}_tokens": int(total[1].item()),
            "tokens": self.state.global_step * self.plan.tokens_per_step,
        }
        self.log(metrics)
        if self.is_world_process_zero():
            self.run.write_status("running", step=self.state.global_step, eval_loss=loss)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        self._paused += time.perf_counter() - began
        return metrics

    def _get_output_dir(self, trial: Any) -> str:
        return str(self.run.path / checkpoints.STAGING) if self._staging else str(self.run.path)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        began = time.perf_counter()
        name = f"checkpoint-{self.state.global_step}"
        staged = self.run.path / checkpoints.STAGING / name
        if self.is_world_process_zero():
            shutil.rmtree(staged.parent, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        self._staging = True
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self._staging = False
        self.accelerator.wait_for_everyone()
        if self.is_world_process_zero():
            checkpoints.seal(staged, trajectory=self.trajectory)
            checkpoints.publish(staged, self.run.path / name)
            checkpoints.rotate(self.run.path, keep=self.args.keep_checkpoints)
            self._record("running")
        self.accelerator.wait_for_everyone()
        self._paused += time.perf_counter() - began

    def _record(self, state: str) -> None:
        step = self.state.global_step
        seconds = round(time.perf_counter() - self._began, 1)
        self.run.write_status(state, step=step, tokens=step * self.plan.tokens_per_step, seconds=seconds)
