"""The Trainer subclass: where pre-training departs from transformers' Trainer (5.23), each place with its reason.

- The schedule: HF's warm-up gives the first step a learning rate of 0 (optimization.py); llm.c's does not.
- Targets of a step: where all rows are full, known without counting. Trainer counts them and gathers the counts of all
  processes in each step.
- The order of rows: a function of the seed, whole steps only. RandomSampler leaves a short last step in each epoch.
- Rows of like length: steps of equal targets. LengthGroupedSampler sorts across steps and counts rows, so steps differ.
- Validation: exact sums over all processes. Trainer averages means of batches and counts padded duplicates.
- The log: reporting callbacks run before user callbacks, so metrics join in `log`. `total_flos` misses 40 % of GPT-2's.
- The save: staged, hashed, sealed and renamed. Trainer writes in place and resumes from whatever is newest.
- Weights of experts: loaded too. Trainer skips those, because transformers saves them under other names.
- The loss between two lines of the log: goes through a checkpoint, and through a NaN. Trainer forgets it, and subtracts
  NaN from NaN for ever after.
"""

import contextlib
import functools
import io
import itertools
import logging
import time
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerControl

from gpt2_repro.batch_plan import BatchPlan, checkpoint_bytes
from gpt2_repro.data.batching import collate_rows
from gpt2_repro.model.experts import load_experts
from gpt2_repro.run_record import RunRecord, events
from gpt2_repro.training.arguments import PretrainingArguments
from gpt2_repro.training.compiled import CompilationReport, time_compilation
from gpt2_repro.training.engine import (
    check_engine,
    describe_engine,
    fix_universal_checkpoint,
    innermost_optimizer,
    zero_gradient_norm,
)
from gpt2_repro.training.guard import UpdateGuard
from gpt2_repro.training.inputs import Inputs
from gpt2_repro.training.loader import choose_sampler, count_positions, training_loader
from gpt2_repro.training.meter import meter_of
from gpt2_repro.training.muon import muon_for
from gpt2_repro.training.progress import ProgressBar
from gpt2_repro.training.ranks import Ranks
from gpt2_repro.training.replicas import require_same_weights
from gpt2_repro.training.resuming import Start
from gpt2_repro.training.samples import TextSampler
from gpt2_repro.training.saving import CheckpointSaver
from gpt2_repro.training.schedule import build_schedule, follow
from gpt2_repro.training.sharding import whole
from gpt2_repro.training.stopping import NOTHING, Stopping, StopSignals
from gpt2_repro.training.tracking import Guarded, guard_reporting, prepare_wandb, report_text
from gpt2_repro.training.validation import Validation
from gpt2_repro.training.watchdog import Watchdog


logger = logging.getLogger(__name__)


class PretrainingTrainer(Trainer):
    """Trains by a BatchPlan and keeps the run directory.

    Args:
        inputs: rows, tokenizer and HellaSwag.
        plan: tokens, rows and steps.
        run: where metrics and checkpoints go.
        environment: what environment.json says; the engine's facts join it once there is an engine.
        run_identity: what a checkpoint must agree on to be resumed.
    """

    args: PretrainingArguments
    control: TrainerControl

    def __init__(
        self,
        *,
        inputs: Inputs,
        plan: BatchPlan,
        run: RunRecord,
        environment: dict[str, Any],
        run_identity: dict[str, Any],
        **kwargs: Any,
    ) -> None:
        prepare_wandb(kwargs["args"].report_to, run.path)
        kwargs["args"].max_steps = plan.max_steps  # an extension may have moved it
        # A compiled model wants one shape: rows of wrapped documents are padded to the longest that there can be.
        length = plan.sequence_length if kwargs["args"].compile_loss else None
        super().__init__(
            data_collator=functools.partial(collate_rows, length=length),
            train_dataset=inputs.train,
            eval_dataset=inputs.validation,
            processing_class=inputs.tokenizer,
            optimizer_cls_and_kwargs=muon_for(kwargs["model"], kwargs["args"]),
            **kwargs,
        )
        self.plan, self.run, self.run_identity = plan, run, run_identity
        self.sampler = choose_sampler(self.train_dataset, plan, self.args)
        self.environment = environment | {"run_identity": run_identity}
        self.full_rows = environment["data"]["request"]["packing"] == "concat"
        self.meter = meter_of(environment)
        run.measured = self.meter.time_breakdown
        self.validation = Validation(inputs, self.args, length=plan.sequence_length, accelerator=self.accelerator)
        limits = {"skip_loss_z": self.args.skip_loss_z, "skip_grad_z": self.args.skip_grad_z}
        mean = functools.partial(self.accelerator.reduce, reduction="mean")
        self.guard = UpdateGuard(**limits, mean=mean, report=self._write_event)
        self.ranks = Ranks()
        self.stopping = Stopping(StopSignals(), self.ranks, self.run.seconds)
        self.watchdog = Watchdog(self.args.hang_timeout)
        size = checkpoint_bytes(self.model.num_parameters(), bf16=self.args.bf16)
        self.saver = CheckpointSaver(run.path, self.accelerator, self.args, expected=size, alive=self.watchdog.arm)
        self._restored_losses: dict[str, Any] | None = None
        self.eval_losses: dict[str, float] = {}  # of the last validation, with its step
        self._use_own_callbacks()

    def _use_own_callbacks(self) -> None:
        guard_reporting(self)
        for stock in (ProgressCallback, PrinterCallback):
            self.remove_callback(stock)
        bar = ProgressBar(self.validation.batches, self.environment.get("reference"))
        sampler = TextSampler(self.run, self.processing_class, functools.partial(report_text, self))
        for own in (bar, Guarded(sampler), self.guard, self.stopping, self.watchdog):
            self.add_callback(own)
        if self.args.compile_loss:
            time_compilation(functools.partial(self.meter.move, to="startup"))
            self.add_callback(CompilationReport(self.model, record=self._record_engine))

    def _init_training_state(self, max_steps: int, *args: Any) -> Any:
        begun = super()._init_training_state(max_steps, *args)
        # Trainer would keep the intervals of the interrupted run, whatever is asked for now.
        self.state.compute_steps(self.args, max_steps)
        return begun

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        # DeepSpeed prints its memory use here, a dozen lines whatever the log level (runtime/bf16_optimizer.py, 0.19.8).
        with contextlib.redirect_stdout(io.StringIO()):
            prepared = super()._prepare_for_training(*args, **kwargs)
        follow(self.lr_scheduler, self.args.learning_rate)
        optimizer = innermost_optimizer(self.model_wrapped, self.optimizer)
        fix_universal_checkpoint(self.model_wrapped, optimizer, weight_decay=self.args.weight_decay)
        engine = describe_engine(self.accelerator, self.model_wrapped, self.optimizer)
        check_engine(engine, self.plan, max_grad_norm=self.args.max_grad_norm, bf16=self.args.bf16)
        self.guard.attach(optimizer, zero_gradient_norm(self.model_wrapped))
        self._record_engine(engine | {"clip": self.args.max_grad_norm, "compiled": self.args.compile_loss})
        logger.info("engine: %s", ", ".join(f"{key} {value}" for key, value in self.environment["engine"].items()))
        return prepared

    def _record_engine(self, facts: dict[str, Any]) -> None:
        self.environment["engine"] = self.environment.get("engine", {}) | facts
        if self.is_world_process_zero():
            self.run.write_environment(self.environment)

    def _run_epoch(self, *args: Any, epoch: int, **kwargs: Any) -> None:
        # Trainer would train one step more when it resumes from the last checkpoint, or was stopped while it validated.
        if self.state.global_step >= self.args.last_step or self.stopping.stops:
            self.control.should_training_stop = True
            return
        # On several processes neither accelerate nor Trainer tells a sampler of its epoch.
        self.sampler.set_epoch(epoch)
        window, self._restored_losses = self._restored_losses, None
        if window is not None:
            sums, process = window["sums"], self.args.process_index
            self._tr_loss += sums[process] if len(sums) == self.args.world_size else sum(sums) / len(sums)
            self._globalstep_last_logged = window["since"]
        super()._run_epoch(*args, epoch=epoch, **kwargs)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if self.is_fsdp_enabled or not load_experts(self.model, resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def restore(self, start: Start) -> None:
        """Restore what transformers' own files do not have, and repeat a validation that was cut short."""
        self.guard.load_state(start.manifest["guard"])
        self._restored_losses = start.manifest["loss_window"]
        due = start.step % self.args.eval_steps == 0 or start.step == self.args.last_step
        missing = due and start.manifest["eval_loss"] is None
        self.args.eval_on_start = self.args.eval_strategy != "no" and missing

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> LambdaLR:
        self.lr_scheduler = build_schedule(optimizer or self.optimizer, self.args, self.run_identity)
        self._created_lr_scheduler = True
        return self.lr_scheduler

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return self.sampler

    def get_train_dataloader(self) -> DataLoader:
        loader = training_loader(self.train_dataset, self.sampler, self.data_collator, self.args)
        return self.accelerator.prepare(loader)

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        self.guard.see_loss(loss)
        return loss

    def _get_grad_norm(self, *args: Any, **kwargs: Any) -> Any:
        self.guard.see_norm(norm := whole(super()._get_grad_norm(*args, **kwargs)))
        return norm

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
        with self.meter.on("data"):  # for the rows; counting targets may wait for the device
            batches = list(itertools.islice(epoch_iterator, num_batches))
        return batches, self._get_num_items_in_batch(batches, device)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add tokens, speed, MFU and cost, write the line to metrics.jsonl, then report as Trainer does."""
        if "loss" in logs:
            self._tr_loss.zero_()
            logs |= {"tokens": self.tokens_trained, **self.meter.read(self.tokens_trained)}
            logs |= ({"updates_skipped": self.guard.total} if self.guard.total else {}) | self.stopping.cost(self.args)
            if self.run.is_stale():
                self.record("running")
        if "loss" in logs or "eval_loss" in logs:
            self._write_event(self.state.global_step, logs)
        super().log(logs, start_time)

    def _write_event(self, step: int, event: dict[str, Any]) -> None:
        if self.is_world_process_zero():
            events.append(self.run.metrics, {"step": step, **event, "time": round(time.time(), 3)})

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Mean negative log-likelihood per target of each set, exact for any number of processes; HellaSwag where due."""
        with self.meter.on("validation"):
            require_same_weights(self.model, self.ranks, step=self.state.global_step)
            metrics_of_all = self.validation.measure(
                self.model.eval(),
                step=self.state.global_step,
                # A validation that a signal cuts short is made up for when the run goes on.
                goes_on=lambda: self.ranks.largest(self.stopping.interruption()) == NOTHING,
                after_batch=lambda: self.callback_handler.on_prediction_step(self.args, self.state, self.control),
            )
            if interruption := self.ranks.largest(self.stopping.interruption()):
                self.stopping.stop(interruption, self.args, self.control)
                return {}
            metrics = metrics_of_all()
            self.log(metrics | {"tokens": self.tokens_trained})
            losses = {key: value for key, value in metrics.items() if key.endswith("_loss")}
            self.eval_losses = losses | {"step": self.state.global_step}
            self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _get_output_dir(self, trial: Any) -> str:
        return str(self.saver.staging)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        write = functools.partial(super()._save_checkpoint, model, trial)
        with self.meter.on("saving"):
            require_same_weights(self.model, self.ranks, step=self.state.global_step)
            self.run.sync()
            self.saver.save(self.state.global_step, write, self._describe_checkpoint, stops=self.stopping.reason)
        self.record("running", save_seconds=round(self.saver.seconds, 2))

    def _describe_checkpoint(self) -> dict[str, Any]:
        losses = self.accelerator.gather(self._tr_loss.reshape(1)).tolist()
        validated = self.eval_losses.get("step") == self.state.global_step
        return {
            "run_identity": self.run_identity,
            "deepspeed_processes": self.args.world_size if self.is_deepspeed_enabled else None,
            "tokens": self.tokens_trained,
            "eval_loss": self.eval_losses["eval_loss"] if validated else None,
            "loss_window": {"since": self._globalstep_last_logged, "sums": losses},
            "guard": self.guard.state(),
            "time_breakdown": self.run.time_breakdown(),
        }

    def record(self, state: str, **values: Any) -> None:
        """Write how far the run is, how it goes and what it has cost into run_status.json."""
        if self.is_world_process_zero():
            # Before the checkpoint is loaded Trainer is at step 0, and the run is not.
            far = {"step": self.state.global_step, "tokens": self.tokens_trained} if self.state.global_step else {}
            self.run.write_status(state, **self.eval_losses | far | values)
