"""Training continues if a tracking service fails, or if wandb has no API key."""

import importlib.util
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock, call

import pytest
import torch
from transformers import Trainer, TrainerState, TrainingArguments
from transformers.integrations import integration_utils
from transformers.integrations.integration_utils import (
    TensorBoardCallback,
    TrackioCallback,
    WandbCallback,
    WandbLogModel,
)

from gpt2_repro.errors import UserError
from gpt2_repro.recipe import TrainingSection, check_trackers
from gpt2_repro.run_record import RunRecord
from gpt2_repro.training import announce
from gpt2_repro.training.tracking import (
    Tracker,
    check_reporting,
    finish_reporting,
    guard_reporting,
    prepare_tracking,
    record_tracking,
)
from gpt2_repro.training.trainer import PretrainingArguments


def trainer_with(*callbacks: Any) -> Any:
    state = TrainerState(is_world_process_zero=True, num_input_tokens_seen=2048, global_step=4)
    trainer = SimpleNamespace(callback_handler=SimpleNamespace(callbacks=list(callbacks)), state=state)
    guard_reporting(cast(Trainer, trainer))
    return trainer


def send(trainer: Any, event: str, **values: Any) -> None:
    for callback in trainer.callback_handler.callbacks:
        model = torch.nn.Linear(1, 1)
        getattr(callback, event)(TrainingArguments(use_cpu=True), trainer.state, None, model=model, **values)


KEYS = [({}, "offline"), ({"WANDB_API_KEY": "k"}, None), ({"WANDB_MODE": "disabled"}, "disabled")]
KEYS += [({"NETRC": "keys"}, None)]


@pytest.mark.parametrize(("variables", "mode"), KEYS)
def test_wandb_without_a_key_does_not_prompt(variables: dict, mode: str | None, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(os, "environ", {"HOME": str(tmp_path)} | variables)
    monkeypatch.chdir(tmp_path)
    Path("keys").write_text("machine api.wandb.ai login user password k", encoding="utf-8")
    prepare_tracking(["none"], tmp_path)
    assert "WANDB_DIR" not in os.environ
    prepare_tracking(["wandb"], tmp_path)
    assert os.environ.get("WANDB_MODE") == mode and os.environ["WANDB_DIR"] == str(tmp_path)
    assert os.environ["TENSORBOARD_LOGGING_DIR"] == str(tmp_path / "tensorboard")
    record_tracking(["wandb"], tmp_path)
    first = os.environ.pop("WANDB_RUN_ID")
    prepare_tracking(["wandb"], tmp_path)
    assert os.environ["WANDB_RUN_ID"] == first and os.environ["WANDB_RESUME"] == "allow"


def test_a_method_that_fails_three_times_is_not_called_again(caplog: pytest.LogCaptureFixture) -> None:
    trackio, reporting = Mock(), object.__new__(TrackioCallback)
    reporting._trackio, reporting._initialized = trackio, True
    trainer = trainer_with(reporting)
    send(trainer, "on_log", logs={"loss": 2.0, "tokens": 2048})
    logged = {"train/loss": 2.0, "train/tokens": 2048, "train/global_step": 4}
    assert trackio.log.mock_calls == [call(logged)] and not caplog.records
    trackio.log.side_effect = ConnectionResetError
    for _ in range(5):
        send(trainer, "on_log", logs={"loss": 2.0, "tokens": 2048})
    assert len(caplog.records) == 3 and trackio.log.call_count == 4


def test_failures_of_one_method_do_not_disable_another(caplog: pytest.LogCaptureFixture, monkeypatch) -> None:
    """For example, wandb cannot upload checkpoints, but receives the losses."""
    trackio, reporting = Mock(), object.__new__(TrackioCallback)
    reporting._trackio, reporting._initialized = trackio, True
    monkeypatch.setattr(reporting, "on_save", Mock(side_effect=FileNotFoundError))
    trainer = trainer_with(reporting)
    for _ in range(5):
        send(trainer, "on_save")
        send(trainer, "on_log", logs={"eval_loss": 2.0, "tokens": 2048})
    assert reporting.on_save.call_count == 3 == len(caplog.records)
    # Losses and tokens are sent together, so that wandb and Trackio can plot over tokens.
    logged = {"eval/loss": 2.0, "train/tokens": 2048, "train/global_step": 4}
    assert trackio.log.mock_calls == 5 * [call(logged)]


@pytest.mark.parametrize(("step", "options"), [(0, {}), (4, {"purge_step": 5})])
def test_tensorboard_hides_the_steps_that_a_resumed_run_repeats(step: int, options: dict, tmp_path: Path) -> None:
    reporting = object.__new__(TensorBoardCallback)
    writer = reporting._SummaryWriter = Mock()
    reporting.tb_writer, reporting.logging_dir = None, str(tmp_path)
    trainer = trainer_with(reporting)
    trainer.state.global_step = step
    send(trainer, "on_train_begin")
    assert writer.mock_calls[0] == call(log_dir=str(tmp_path), **options)


@pytest.mark.parametrize("setting", ["false", "end", "checkpoint"])
@pytest.mark.parametrize("is_complete", [True, False])
def test_wandb_gets_the_final_model_after_it_is_written(setting: str, is_complete: bool, tmp_path: Path) -> None:
    """transformers would save the model on rank 0 only, before final/ is written."""
    (tmp_path / "final").mkdir()
    reporting = object.__new__(WandbCallback)
    reporting._wandb, reporting._initialized, reporting._log_model = Mock(), True, WandbLogModel(setting)
    trainer = trainer_with(reporting)
    trainer.run, trainer.watchdog = RunRecord(tmp_path), Mock()
    trainer.when = SimpleNamespace(reason=None if is_complete else "SIGTERM")
    trainer.is_world_process_zero = lambda: True
    send(trainer, "on_train_end")
    assert not reporting._wandb.mock_calls
    finish_reporting(trainer)
    uploaded = [call(str(tmp_path / "final"))] if is_complete and setting != "false" else []
    assert reporting._wandb.Artifact.return_value.add_dir.mock_calls == uploaded
    assert reporting._wandb.run.log_artifact.call_count == len(uploaded)


def test_a_service_that_fails_at_the_end_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    reporting = object.__new__(WandbCallback)
    reporting._wandb, reporting._initialized, reporting._log_model = Mock(), True, WandbLogModel.END
    reporting._wandb.Artifact.side_effect = ValueError
    tracker = Tracker(reporting)
    tracker.on_train_end(TrainingArguments(use_cpu=True), TrainerState(), None)
    tracker.finish(tmp_path)
    assert len(caplog.records) == 1


@pytest.mark.parametrize("launcher", [("python",), ("fsdp2", 2)], ids=["one", "fsdp2"])
def test_wandb_does_not_keep_the_final_model_from_being_written(launcher, type_warm, tiny_recipe, tmp_path) -> None:
    words = ("train.py", tiny_recipe, "--output_dir", tmp_path / "run", "--report_to", "wandb")
    words += ("--max_steps", 4, "--per_device_train_batch_size", 4)
    offline = {"WANDB_MODE": "offline", "WANDB_LOG_MODEL": "end", "HOME": str(tmp_path)}
    done = type_warm(*launcher, *words, "--hang_timeout", 60, **offline)
    assert done.returncode == 0, done.stdout + done.stderr
    staged = (tmp_path / ".local" / "share" / "wandb" / "artifacts" / "staging").iterdir()
    weights = (tmp_path / "run" / "final" / "model.safetensors").read_bytes()
    assert weights in [path.read_bytes() for path in staged]


@pytest.mark.parametrize("name", ["trackio", "tensorboard"])
def test_a_missing_package_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integration_utils, "get_available_reporting_integrations", lambda: ["wandb"])
    with pytest.raises(UserError, match=f"pip install {name}"):
        check_reporting([name])
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: None)
    with pytest.raises(UserError, match=f"pip install {name}"):
        check_trackers([name])
    check_trackers(["none"])


def test_tracking_services_get_the_settings(tmp_path: Path) -> None:
    args = PretrainingArguments(output_dir=str(tmp_path), use_cpu=True, settings=TrainingSection(ema_steps=7))
    written = json.loads(args.to_json_string())
    assert (written["ema_steps"], written["tokens_per_step"]) == (7, 524_288) and "settings" not in written


def test_a_command_is_recorded_without_secrets() -> None:
    words = "--a https://me:secret@host/x --b s3://bucket/x?sig=secret --c s3://bucket/x?y"
    assert announce.SECRET.sub("://…", words) == "--a https://…host/x --b s3://… --c s3://bucket/x?y"
