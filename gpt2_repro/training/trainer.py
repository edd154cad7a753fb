"""A Trainer subclass for pre-training. Comments explain the differences from transformers' Trainer (5.23).

One optimizer step in the order of time, with the methods that act. This step also saves, validates and stops the run.
"Trainer" is transformers' own class, whose `_run_epoch` calls them (tests/training/test_timeline.py). Under DeepSpeed,
what is marked with (*) happens within the last backward pass (accelerate's `DeepSpeedEngineWrapper.backward` calls
`engine.step`). Before the update, hooks of its optimizer call `wait_until_staged` and the guard's `_before_update`; the
later calls then change nothing.

    read the rows of all micro-batches      PretrainingTrainer.get_batch_samples, Meter.start
    begin a trace (--profile_step)          StepProfile.on_step_begin
    forward and backward pass of each       Trainer.training_step, PretrainingTrainer.floating_point_ops
    between two passes                      Watchdog.on_substep_end
    clip (*)                                PretrainingTrainer._clip_grad_norm
    take the norm, wait for a copy (*)      PretrainingTrainer._get_grad_norm, CheckpointSaver.wait_until_staged,
                                            UpdateGuard.see_norm
    update, unless it is not finite (*)     UpdateGuard._before_update, AdamW.step
    average the weights (--ema_steps)       WeightAverage.on_optimizer_step
    advance the learning rate               LearningRate.step
    count a skipped update                  UpdateGuard.on_step_end, UpdateGuard.after_step
    decide: log, save, validate, stop       StepControl.on_step_end, StepControl._request
    restart the watchdog                    Watchdog.on_step_end
    end and write the trace                 StepProfile.on_step_end
    see what earlier saves have become      PretrainingTrainer._maybe_log_save_evaluate, CheckpointSaver.poll,
                                            PretrainingTrainer._report_saves
    write the log to metrics.jsonl          PretrainingTrainer.log, Meter.read, PretrainingTrainer._write_event
    save; before a stop, until complete     PretrainingTrainer._save_checkpoint, CheckpointSaver.save,
                                            CheckpointSaver.finish
    print and report the log                ProgressBar.on_log
    validate                                PretrainingTrainer.evaluate, Validation.measure, ProgressBar.on_prediction_step
    sample text                             TextSampler.on_evaluate
    before the run ends: finish all saves   PretrainingTrainer._finish_saves
"""

import contextlib
import copy
import dataclasses
import functools
import io
import itertools
import logging
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import DefaultFlowCallback, PreTrainedModel, Trainer, TrainerState, TrainingArguments, modeling_utils
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME

from gpt2_repro.checkpoints.resuming import RunIdentity, Start
from gpt2_repro.checkpoints.saving import CheckpointSaver, SavingSettings
from gpt2_repro.checkpoints.staged_saves import StagedFiles
from gpt2_repro.config import values_of
from gpt2_repro.model.load import load_experts
from gpt2_repro.model.size import bytes_of_rank, checkpoint_bytes, tokens_per_chunk
from gpt2_repro.optim.average import WeightAverage
from gpt2_repro.optim.schedule import build_schedule
from gpt2_repro.recipe import TrainingSection
from gpt2_repro.run_record import FRESH, RunRecord, events
from gpt2_repro.run_record.environment import Environment
from gpt2_repro.run_record.layout import AVERAGE_VARIANT
from gpt2_repro.training import engine
from gpt2_repro.training.guard import UpdateGuard
from gpt2_repro.training.inputs import Inputs, count_positions, training_loader
from gpt2_repro.training.meter import Meter
from gpt2_repro.training.sharded import has_shards, whole
from gpt2_repro.training.validation import Validation
from gpt2_repro.training.when import Interrupted, StepControl, Watchdog


logger = logging.getLogger(__name__)


@dataclasses.dataclass(kw_only=True)
class PretrainingArguments(TrainingArguments):
    """The arguments of transformers' Trainer, and the settings that they come from."""

    settings: TrainingSection

    def turn_off_compile(self) -> None:
        """Train without torch.compile, because Triton does not work on this GPU."""
        self.settings = dataclasses.replace(self.settings, torch_compile=False)

    def to_dict(self) -> dict[str, Any]:
        """Return the values of all fields, which tracking services show."""
        values = super().to_dict()
        return values | values_of(values.pop("settings"))


class PretrainingTrainer(Trainer):
    """A Trainer that follows a BatchPlan and writes the run directory.

    Args:
        environment: the content of environment.json, including the batch plan.
    """

    args: PretrainingArguments
    control: Any

    def __init__(
        self,
        *,
        model: PreTrainedModel,
        args: PretrainingArguments,
        inputs: Inputs,
        run: RunRecord,
        environment: Environment,
        identity: RunIdentity = RunIdentity({}),  # noqa: B008 (frozen)
    ) -> None:
        settings = args.settings
        optimizer = engine.own_optimizer(model, settings, deepspeed=args.deepspeed_plugin is not None)
        super().__init__(
            model=model,
            args=args,
            train_dataset=inputs.train,
            eval_dataset=inputs.validation,
            processing_class=inputs.tokenizer,
            optimizer_cls_and_kwargs=optimizer,
        )
        if self.is_deepspeed_enabled:
            # accelerate (1.15) takes the number of the DeepSpeed configuration and warns that it differs from 1.
            self.accelerator.gradient_accumulation_steps = args.gradient_accumulation_steps
        self.run = run
        self.environment = environment
        self.plan = environment.plan
        self.meter = Meter(environment, compiled=bool(settings.torch_compile))
        run.measure_with(self.meter.time_breakdown)
        self.guard = UpdateGuard(self._write_event)
        self.watchdog = Watchdog(settings.hang_timeout)
        self.average = WeightAverage(settings.ema_steps)
        self.saver = self._saver(identity)
        self.when = StepControl(settings, self.run, self.saver)
        self.validation = Validation(inputs, self.args, self.plan, self.when)
        self.restored_losses: dict[str, Any] | None = None  # the loss window in the manifest of a checkpoint
        self.eval_losses: dict[str, float] = {}  # the losses and the step of the last validation
        self._held_report: Callable[[], None] | None = None
        self._saved_states: dict[int, TrainerState] = {}  # at each save that is not complete yet
        self.remove_callback(DefaultFlowCallback)  # StepControl replaces it
        for own in (self.guard, self.when, self.watchdog, self.average):
            self.add_callback(own)

    def _saver(self, identity: RunIdentity) -> CheckpointSaver:
        settings = self.args.settings
        parameters = self.model.num_parameters()
        averaged = settings.ema_steps > 0
        rank = self.args.process_index
        shards = 0
        if self.is_deepspeed_enabled:
            shards = self.args.world_size
        return CheckpointSaver(
            self.run,
            SavingSettings(settings.rotation, settings.background_save, settings.sync_to, identity),
            device=self.args.device.type,
            total_bytes=checkpoint_bytes(parameters, bf16=settings.is_half, averaged=averaged),
            own_bytes=bytes_of_rank(parameters, bf16=settings.is_half, averaged=averaged, rank=rank, shards=shards),
            alive=self.watchdog.arm,
            prepare=engine.prepare_first_save,
        )

    def restore(self, start: Start) -> None:
        """Restore from a checkpoint what Trainer does not: counts of skipped updates, and the loss window."""
        if start.checkpoint is not None:
            self.saver.resume_at(start.step)
            self.restored_losses = start.manifest["loss_window"]
            self.guard.load_state(start.manifest["guard"])

    def settle(self) -> None:
        """Wait for the last save after the last step, and check the last update. A collective."""
        self._finish_saves()
        self.guard.settle()
        self.when.conclude(self.state.global_step)

    def _init_training_state(self, max_steps: int, *args: Any) -> Any:
        state = super()._init_training_state(max_steps, *args)
        # Trainer would keep the logging and saving intervals of the interrupted run and ignore changed options.
        self.state.compute_steps(self.args, max_steps)
        return state

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        # DeepSpeed (0.19.8) rounds the weights to bf16 or fp16 before it copies the fp32 master weights from them.
        rounded = resume_from_checkpoint is None and self.is_deepspeed_enabled and self.args.settings.is_half
        weights: dict[str, torch.Tensor] = {}
        if rounded:
            weights = {name: weight.detach().clone() for name, weight in self.model.named_parameters()}
        # DeepSpeed prints a dozen lines about memory here, at any log level (runtime/bf16_optimizer.py, 0.19.8).
        with contextlib.redirect_stdout(io.StringIO()):
            prepared = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        zero = self.model_wrapped.optimizer if self.is_deepspeed_enabled else None
        optimizer = (zero or self.optimizer).optimizer  # torch's, without the wrappers of DeepSpeed and accelerate
        engine.set_masters(self.model, weights)
        engine.skip_repeated_work(self.model_wrapped, self.model, self.optimizer)
        if self.is_deepspeed_enabled:
            engine.add_gradients_directly(zero)
        self.lr_scheduler.set_peak(self.args.learning_rate)
        engine.fix_restored_optimizer(self.model_wrapped, optimizer, weight_decay=self.args.weight_decay)
        facts = engine.describe_engine(self.accelerator, self.model_wrapped, optimizer)
        engine.check_engine(facts, self.environment, max_grad_norm=self.args.max_grad_norm)
        optimizer.register_step_pre_hook(self.saver.wait_until_staged)
        self.guard.attach(optimizer, zero, loss_scale=engine.loss_scale(self.accelerator, zero))
        self.average.attach(optimizer, zero)
        chunk = tokens_per_chunk(self.model.config.vocab_size, self.environment.accelerator.memory_bytes or 0)
        facts["clip"] = self.args.max_grad_norm
        facts["compiled"] = bool(self.args.settings.torch_compile)
        facts["tokens_per_chunk_of_logits"] = chunk
        self.record_engine(facts)
        self.run.end_phase("engine")
        return prepared

    def _record_startup(self) -> None:
        """Before the second step, log and record how long the phases of the start have taken."""
        if "loading and validation" not in self.run.startup:
            return self.run.end_phase("loading and validation")
        self.run.end_phase("first step")
        phases = self.run.startup
        self.environment = dataclasses.replace(self.environment, startup=phases)
        self.record_engine({})
        if self.args.settings.torch_compile:
            # The kernel has changed if it could not be compiled. A resumed run uses the new one.
            compiled = "training" in self.model.compiled_graphs
            self.record_engine({"compiled": compiled, "attention": self.model.config._attn_implementation})
            if not compiled:
                logger.warning("Nothing was compiled. Unset TORCHDYNAMO_DISABLE and TORCH_COMPILE_DISABLE.")
        listed = ", ".join(f"{name} {seconds:.1f}" for name, seconds in phases.items())
        logger.info("start-up: %.1f s (%s)", sum(phases.values()), listed)

    def record_engine(self, facts: dict[str, Any]) -> None:
        """Add properties of the training engine to environment.json."""
        self.environment = dataclasses.replace(self.environment, engine={**self.environment.engine, **facts})
        if self.is_world_process_zero():
            self.run.write_environment(self.environment)

    def _run_epoch(self, *args: Any, epoch: int, **kwargs: Any) -> None:
        # Trainer would train one more step if it resumes from the last checkpoint or was stopped during a validation.
        if self.when.is_over(self.state.global_step):
            self.control.should_training_stop = True
            return
        # After a resume on several processes, accelerate's wrappers do not pass set_epoch on to the sampler.
        self.sampler.set_epoch(epoch)
        # The sum of the losses since the last log line. Trainer loses this sum on a resume.
        window = self.restored_losses
        self.restored_losses = None
        if window is not None:
            sums = [math.nan if total is None else total for total in window["sums"]]  # null: it was not finite
            own_sum = sum(sums) / len(sums)
            if len(sums) == self.args.world_size:
                own_sum = sums[self.args.process_index]
            self._tr_loss += own_sum
            self._globalstep_last_logged = window["since"]
        super()._run_epoch(*args, epoch=epoch, **kwargs)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        # Trainer does not restore the weights of experts, because transformers saves them under other names.
        if self.is_fsdp_enabled or not load_experts(self.model, resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        # A checkpoint stores tied weights once, so Trainer would warn that lm_head.weight is missing.
        missing = set(load_result.missing_keys)
        load_result.missing_keys[:] = missing - set(self.model.all_tied_weights_keys)
        super()._issue_warnings_after_load(load_result)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        # The first step has a learning rate above 0, as in llm.c. Trainer's warm-up begins at 0.
        self.lr_scheduler = build_schedule(optimizer or self.optimizer, self.args.settings)
        self._created_lr_scheduler = True
        return self.lr_scheduler

    def get_train_dataloader(self) -> Any:
        compiled = bool(self.args.settings.torch_compile)
        loader, self.sampler = training_loader(self.train_dataset, self.plan, self.args, compiled=compiled)
        return self.accelerator.prepare(loader)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        if self.is_deepspeed_enabled:
            # Trainer and accelerate would convert the norm to a float in every step, and so wait for the device.
            grad_norm = self.model_wrapped.get_global_grad_norm()
        elif grad_norm is None:
            grad_norm = engine.clip_gradients(self.accelerator, self.optimizer, math.inf)
        # DeepSpeed has updated the weights already, after the hook of its optimizer. But it skips update and hook if an
        # fp16 gradient overflows, and what changes later must wait then, too.
        self.saver.wait_until_staged()
        norm = whole(grad_norm)
        self.guard.see_norm(norm)
        return norm

    def _clip_grad_norm(self, model: Any) -> Any:
        if self.is_deepspeed_enabled:  # it clips in its step
            return None
        return engine.clip_gradients(self.accelerator, self.optimizer, self.args.max_grad_norm)

    def floating_point_ops(self, inputs: Any) -> int:
        return 0  # total_flos misses 40 % of GPT-2's FLOPs

    @property
    def tokens_trained(self) -> int:
        return self.state.num_input_tokens_seen

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> tuple[list[Any], int]:
        """Return this rank's micro-batches of a step, and the targets of all ranks."""
        if not self.environment.startup:
            self._record_startup()
        self.meter.start(self.tokens_trained)
        with self.meter.on("data"):  # without the count of targets, which may wait for the device
            batches = list(itertools.islice(epoch_iterator, num_batches))
        targets = self.plan.tokens_per_step
        # The loss of a micro-batch is world size * (its loss sum) / targets. Averaged over ranks and summed over
        # micro-batches, this is the mean loss per target of a step. Trainer applies the factor "world size".
        # Trainer counts the targets in every step and gathers the counts of all processes.
        if self.environment.data["request"]["packing"] != "concat":
            targets, positions = self.accelerator.reduce(count_positions(batches, device), reduction="sum").tolist()
            self.meter.count(targets, positions)
        self.state.num_input_tokens_seen += targets
        return batches, targets

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add tokens, speed, MFU and cost, write `logs` to metrics.jsonl, and report them."""
        if "loss" in logs:
            self._tr_loss.zero_()  # Trainer subtracts the sum from itself, which does not remove a NaN
            # A callback that added these metrics would run after the reporting callbacks.
            logs["tokens"] = self.tokens_trained
            logs |= self.meter.read(self.tokens_trained)
            self.guard.settle()  # the device has ended the step, because Trainer has read its loss
            if self.guard.total:
                logs["updates_skipped"] = self.guard.total
            if self.guard.loss_scale:
                logs["loss_scale"] = self.guard.loss_scale()
            price = self.args.settings.usd_per_hour
            if price and self.is_world_process_zero():
                logs["usd"] = round(self.run.seconds() / 3600 * price, 2)
            if time.monotonic() - self.run.written > FRESH:
                self.record("running")
        if "loss" in logs or "eval_loss" in logs:
            self._write_event(self.state.global_step, logs)
        report = functools.partial(super().log, logs, start_time)
        if "loss" in logs:
            self._held_report = report  # until the checkpoint is saved
        else:
            report()

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        # Trainer reports and validates before it saves, so a crash there would lose all steps since the last checkpoint.
        self.saver.poll()
        self._report_saves()
        validates = self.control.should_evaluate
        saves = self.control.should_save
        self.control.should_evaluate = False
        self.control.should_save = False
        super()._maybe_log_save_evaluate(*args, **kwargs)
        if saves:
            self._save_checkpoint(self.model, None)
        if self._held_report is not None:
            self._held_report()
            self._held_report = None
        if validates:
            self.evaluate()
        if self.control.should_save:  # a signal interrupted a validation at a step that was not saved
            self.control.should_save = False
            self._save_checkpoint(self.model, None)
        if self.when.is_over(self.state.global_step):  # before on_train_end
            self._finish_saves()

    def _finish_saves(self) -> None:
        """Wait until the last save is complete, and call on_save. A collective."""
        with self.meter.on("saving"):
            self.saver.finish()
        self._report_saves()

    def _report_saves(self) -> None:
        """Call on_save for each checkpoint that is complete by now, on rank 0."""
        # Trainer calls on_save directly after its save, but the folder of a save in the background exists only later.
        for step in self.saver.take_completed():
            state = self._saved_states.pop(step)
            self.control = self.callback_handler.call_event("on_save", self.args, state, self.control)

    def _write_event(self, step: int, event: dict[str, Any]) -> None:
        if self.is_world_process_zero():
            events.append(self.run.metrics, {"step": step, **event, "time": round(time.time(), 3)})

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Return the metrics of all validation sets, or {} if a signal interrupted it."""
        with self.meter.on("validation"):
            step = self.state.global_step
            is_saved = self.saver.saved_step == step
            if not is_saved:
                engine.require_same_weights(self.model, step=step)
            report = self.callback_handler.on_prediction_step
            after_batch = functools.partial(report, self.args, self.state, self.control)
            self.saver.wait_until_staged()  # so that a kill during a validation does not lose the save before it
            model = self.model.eval()
            try:
                # Trainer would average the means of batches and count padded duplicates.
                metrics = self.validation.measure(model, step=step, after_batch=after_batch)
                if self.average.exists:
                    with self.average.applied():
                        metrics |= self.validation.measure(model, step=step, after_batch=after_batch, averaged=True)
            except Interrupted:
                self.control.should_save = not is_saved
                return {}
            self.log(metrics | {"tokens": self.tokens_trained})
            losses = {key: value for key, value in metrics.items() if key.endswith(events.LOSSES)}
            self.eval_losses = losses | {"step": step}
            self.record("running")
            if is_saved and self.is_world_process_zero():
                self.saver.rotate()  # this validation decides whether the best checkpoint is another one
            self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        # Trainer writes in place, and resumes from the newest folder even if it is incomplete.
        step = self.state.global_step
        # `save` waits for the writers, too. But on_save must be called before, for the previous checkpoint, which this
        # save can delete.
        with self.meter.on("saving"):
            self.saver.wait_for_writers()
        self._report_saves()
        if self.is_world_process_zero():
            self._saved_states[step] = copy.copy(self.state)
        with self.meter.on("saving"):
            is_saved = self.saver.save(step, self._write_checkpoint, stops=self.when.reason, rolling=self.when.rolling)
        if not is_saved:
            self._saved_states.pop(step, None)
        self.when.restart_timers()
        self.record("running")

    def _write_checkpoint(self, folder: Path) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
        """Write a checkpoint to `folder` or to memory. Return the large files, and facts for the manifest. A collective.

        Trainer would also write a pickle of its arguments. recipe.yaml has the settings.
        """
        engine.require_same_weights(self.model, step=self.state.global_step)
        folder.mkdir(parents=True, exist_ok=True)
        files = StagedFiles(folder, self.saver.memory, self.watchdog.arm)
        self._save_weights(files, self._gather_weights())
        self._save_optimizer(files)
        self._save_scaler(str(folder))
        self._save_rng_state(str(folder))
        if self.average.exists:
            average = self.average.weights(self.model, keep=self.args.should_save)
            self._save_weights(files, average, variant=AVERAGE_VARIANT)
        if self.args.should_save:
            self.processing_class.save_pretrained(str(folder))
            self.state.save_to_json(str(folder / TRAINER_STATE_NAME))
        self.run.sync()
        losses = self.accelerator.gather(self._tr_loss.reshape(1)).tolist()
        return files.files, {
            "run_identity": self.environment.run_identity,
            "deepspeed_processes": self.args.world_size if self.is_deepspeed_enabled else None,
            "tokens": self.tokens_trained,
            "loss_window": {"since": self._globalstep_last_logged, "sums": losses},
            "guard": self.guard.state(),
            "time_breakdown": self.run.time_breakdown(),
        }

    def _gather_weights(self) -> dict[str, Any]:
        """Return the weights, complete at least on the process that saves. A collective."""
        if has_shards(self.model):
            return self.accelerator.get_state_dict(self.model_wrapped)
        weights = self.model.state_dict()
        if self.is_deepspeed_enabled:
            # These weights are views of one buffer. With DLPack, each gets its own storage without a copy. Otherwise,
            # transformers would save tied weights twice.
            weights = {name: torch.from_dlpack(weight) for name, weight in weights.items()}
        return weights

    def _save_weights(self, files: StagedFiles, weights: dict[str, Any] | None, *, variant: str | None = None) -> None:
        if not self.args.should_save:
            return
        # save_pretrained has no argument for the function that writes the weights.
        save_file = modeling_utils.safe_save_file
        modeling_utils.safe_save_file = files.save_safetensors
        try:
            self.model.save_pretrained(str(files.folder), state_dict=weights, variant=variant)
        finally:
            modeling_utils.safe_save_file = save_file

    def _save_optimizer(self, files: StagedFiles) -> None:
        """Save the optimizer and the learning-rate schedule. A collective."""
        if self.is_deepspeed_enabled:
            engine.save_files_with(self.model_wrapped, files.save)
        if self.is_deepspeed_enabled or self.is_fsdp_enabled:
            self._save_optimizer_and_scheduler(str(files.folder))
        elif self.args.should_save:
            files.save(self.optimizer.state_dict(), files.folder / OPTIMIZER_NAME)
            torch.save(self.lr_scheduler.state_dict(), files.folder / SCHEDULER_NAME)

    def record(self, state: str, **values: Any) -> None:
        """Write `state`, `values`, and the run's step and losses to run_status.json."""
        if self.is_world_process_zero():
            # Before a checkpoint is loaded, Trainer is at step 0. The step of the run is then not written.
            step = self.state.global_step
            status: dict[str, Any] = dict(self.eval_losses)
            if step:
                status["step"] = step
                status["tokens"] = self.tokens_trained
            if self.saver.seconds:
                status["save_seconds"] = round(self.saver.seconds, 2)
            self.run.write_status(state, **status | values)
