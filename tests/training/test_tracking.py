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
from transformers.integrations.integration_utils import TrackioCallback

from gpt2_repro.errors import UserError
from gpt2_repro.planning.recipe import TrainingSection, check_trackers
from gpt2_repro.training import announce
from gpt2_repro.training.tracking import check_reporting, guard_reporting, prepare_tracking
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
    first = os.environ.pop("WANDB_RUN_ID")
    prepare_tracking(["wandb"], tmp_path)
    assert os.environ["WANDB_RUN_ID"] == first and os.environ["WANDB_RESUME"] == "allow"


def test_a_service_that_fails_three_times_is_disabled(caplog: pytest.LogCaptureFixture) -> None:
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
