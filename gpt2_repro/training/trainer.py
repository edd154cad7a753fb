"""The Trainer subclass: where pre-training departs from transformers' Trainer (5.23), each place with its reason.

- The schedule: HF's warm-up gives the first step a learning rate of 0 (optimization.py); llm.c's does not.
- Targets of a step: where all rows are full, known without counting. Trainer counts them and gathers the counts of all
  processes in each step.
- The order of rows: a function of the seed, whole steps only. RandomSampler leaves a short last step in each epoch.
- Rows of like length: steps of equal targets. LengthGroupedSampler sorts across steps and counts rows, so steps differ.
- Validation: exact sums over all processes. Trainer averages means of batches and counts padded duplicates.
- The log: reporting callbacks run before user callbacks, so metrics join in `log`. `total_flos` misses 40 % of GPT-2's.
- The save: staged, sealed and renamed. Trainer writes in place and resumes from whatever is newest.
"""

import contextlib
import functools
import io
import itertools
import logging
import shutil
import time
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerControl

from gpt2_repro.compute import BatchPlan, learning_rate_factor
from gpt2_repro.data.batching import LengthGroupedBatches
from gpt2_repro.data.collator import collate_rows
from gpt2_repro.data.rows import Rows
from gpt2_repro.training import checkpoints
from gpt2_repro.training.arguments import PretrainingArguments
from gpt2_repro.training.compiled import CompilationReport
from gpt2_repro.training.engine import check_engine, describe_engine
from gpt2_repro.training.loader import choose_sampler, count_positions, grouped_loader
from gpt2_repro.training.meter import Meter
from gpt2_repro.training.progress import ProgressBar
from gpt2_repro.training.run_directory import RunDirectory, refuse_another_run
from gpt2_repro.training.samples import TextSampler
from gpt2_repro.training.stopping import LastStep
from gpt2_repro.training.tracking import guard_reporting, prepare_wandb
from gpt2_repro.training.validation import mean_losses, sum_losses, validation_batches


logger = logging.getLogger(__name__)


class PretrainingTrainer(Trainer):
    """Trains by a BatchPlan and keeps the run directory.

    Args:
        plan: tokens, rows and steps.
        eval_dataset: rows, or several sets of them by name, the main one as "".
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
        # A compiled model wants one shape: rows of wrapped documents are padded to the longest that there can be.
        length = plan.sequence_length if kwargs["args"].compile_loss else None
        super().__init__(data_collator=functools.partial(collate_rows, length=length), **kwargs)
        self.plan = plan
        self.eval_sets: dict[str, Rows] = (
            self.eval_dataset if isinstance(self.eval_dataset, dict) else {"": self.eval_dataset}
        )
        self.sampler = choose_sampler(self.train_dataset, plan, self.args)
        self.run = run
        self.environment = environment | {"trajectory": trajectory}
        self.trajectory = trajectory
        self.full_rows = environment["data"]["request"]["packing"] == "concat"
        peak = environment["accelerator"]["peak_flops"] if environment["precision"] == "bf16" else None
        self.meter = Meter(
            flops_per_token=environment["flops_per_token"], peak_flops=peak and peak * plan.num_processes
        )
        self._staging = False
        self._use_own_callbacks()

    def _use_own_callbacks(self) -> None:
        guard_reporting(self)
        for stock in (ProgressCallback, PrinterCallback):
            self.remove_callback(stock)
        shares = [-(-len(rows) // self.args.world_size) for rows in self.eval_sets.values()]
        batches = sum(-(-share // self.args.per_device_eval_batch_size) for share in shares)
        self.add_callback(ProgressBar(eval_batches=batches))
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

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return self.sampler

    def get_train_dataloader(self) -> DataLoader:
        if not isinstance(self.sampler, LengthGroupedBatches):
            return super().get_train_dataloader()
        loader = grouped_loader(self.train_dataset, self.sampler, self.data_collator, self.args)
        return self.accelerator.prepare(loader)

    def floating_point_ops(self, inputs: Any) -> int:
        return 0

    @property
    def tokens_trained(self) -> int:
        """Targets of all steps so far, as a checkpoint of the run knows them."""
        return self.state.num_input_tokens_seen

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> int:
        targets = self.plan.tokens_per_step
        if not self.full_rows:
            counts = self.accelerator.reduce(count_positions(batch_samples, device), reduction="sum")
            targets, positions = counts.tolist()
            self.meter.count(targets, positions)
        self.state.num_input_tokens_seen += targets
        return targets

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> tuple[list[Any], int]:
        self.meter.start(self.tokens_trained)
        with self.meter.wait():  # for the rows; counting targets may wait for the device
            batches = list(itertools.islice(epoch_iterator, num_batches))
        return batches, self._get_num_items_in_batch(batches, device)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add tokens, speed and MFU, write the line to metrics.jsonl, then report as Trainer does."""
        if "loss" in logs:
            logs |= {"tokens": self.tokens_trained, **self.meter.read(self.tokens_trained)}
        if self.is_world_process_zero() and ("loss" in logs or "eval_loss" in logs):
            self.run.append("metrics.jsonl", {"step": self.state.global_step, **logs, "time": round(time.time(), 3)})
        super().log(logs, start_time)

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Mean negative log-likelihood per target of each validation set, exact for any number of processes."""
        sets = self.eval_sets if eval_dataset is None else {"": eval_dataset}
        with self.meter.pause():
            model = self.model.eval()
            sums = torch.stack([self._sum_losses(model, rows) for rows in sets.values()])
            sums = self.accelerator.reduce(sums, reduction="sum").tolist()
            by_set = dict(zip(sets, sums, strict=True))
            metrics = mean_losses(by_set, prefix=metric_key_prefix, step=self.state.global_step)
            self.log(metrics | {"tokens": self.tokens_trained})
            if self.is_world_process_zero():
                losses = {key: value for key, value in metrics.items() if key.endswith("_loss")}
                self.run.write_status("running", step=self.state.global_step, **losses)
            self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _sum_losses(self, model: Any, rows: Any) -> torch.Tensor:
        batches = validation_batches(
            rows,
            process=self.args.process_index,
            processes=self.args.world_size,
            size=self.args.per_device_eval_batch_size,
            fixed_length=self.plan.sequence_length if self.args.compile_loss else None,
        )
        return sum_losses(model, batches, self.args.device, self._after_validation_batch)

    def _after_validation_batch(self) -> None:
        self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)

    def _get_output_dir(self, trial: Any) -> str:
        return str(self.run.path / checkpoints.STAGING) if self._staging else str(self.run.path)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        with self.meter.pause():
            self._save_whole(model, trial)

    def _save_whole(self, model: Any, trial: Any) -> None:
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

    def _record(self, state: str) -> None:
        step = self.state.global_step
        seconds = round(time.perf_counter() - self._began, 1)
        self.run.write_status(state, step=step, tokens=self.tokens_trained, seconds=seconds)
