"""Training continues if a tracking service fails, or if wandb has no API key. Curves are plotted over tokens."""

import importlib.util
import logging
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock, call

import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments
from transformers.integrations import integration_utils
from transformers.integrations.integration_utils import TensorBoardCallback, TrackioCallback, WandbCallback

from gpt2_repro import cli
from gpt2_repro.errors import UserError
from gpt2_repro.planning.recipe import check_trackers
from gpt2_repro.training import announce
from gpt2_repro.training.tracking import check_reporting, guard_reporting, prepare_tracking, report_text


def test_wandb_uses_a_token_axis_and_shows_samples(caplog: pytest.LogCaptureFixture) -> None:
    reporting, state = WandbCallback(), TrainerState(is_world_process_zero=True, num_input_tokens_seen=2048)
    wandb = reporting._wandb = Mock(Html=str)
    trainer = SimpleNamespace(callback_handler=SimpleNamespace(callbacks=[reporting, TrainerCallback()]), state=state)
    guard_reporting(trainer)
    for callback in trainer.callback_handler.callbacks:
        callback.on_train_begin(TrainingArguments(use_cpu=True), state, None, model=torch.nn.Linear(1, 1))
    axes = [call("train/global_step"), call("*", step_metric="train/global_step", step_sync=True)]
    axes += [call("train/tokens"), call("*", step_metric="train/tokens", step_sync=True)]  # our axis is defined last
    assert wandb.define_metric.mock_calls == axes
    report_text(trainer, "a <b> c")
    (values,) = wandb.log.call_args.args
    assert values["train/tokens"] == 2048 and "a &lt;b&gt; c" in values["sample"] and not caplog.records
    wandb.log.side_effect = ConnectionResetError("a sample that wandb refuses costs nothing")
    report_text(trainer, "a")
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("variables", "mode"),
    [({}, "offline"), ({"WANDB_API_KEY": "k"}, None), ({"WANDB_MODE": "disabled"}, "disabled")],
)
def test_wandb_without_a_key_does_not_prompt(variables: dict, mode: str | None, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "environ", {"HOME": str(tmp_path)} | variables)
    prepare_tracking(["none"], tmp_path)
    assert "WANDB_DIR" not in os.environ
    prepare_tracking(["wandb"], tmp_path)
    assert os.environ.get("WANDB_MODE") == mode and os.environ["WANDB_DIR"] == str(tmp_path)
    first = os.environ.pop("WANDB_RUN_ID")
    prepare_tracking(["wandb"], tmp_path)
    assert os.environ["WANDB_RUN_ID"] == first and os.environ["WANDB_RESUME"] == "allow"


def trainer_with(*callbacks: Any) -> Any:
    state = TrainerState(is_world_process_zero=True, num_input_tokens_seen=2048, global_step=4)
    trainer = SimpleNamespace(callback_handler=SimpleNamespace(callbacks=list(callbacks)), state=state)
    guard_reporting(cast(Trainer, trainer))
    return trainer


def send(trainer: Any, **logs: float) -> None:
    for callback in trainer.callback_handler.callbacks:
        callback.on_log(TrainingArguments(use_cpu=True), trainer.state, None, model=torch.nn.Linear(1, 1), logs=logs)


def test_trackio_uses_tokens_as_steps_and_shows_samples(caplog: pytest.LogCaptureFixture) -> None:
    trackio, reporting = Mock(Markdown=str), object.__new__(TrackioCallback)
    reporting._trackio, reporting._initialized = trackio, True
    trainer = trainer_with(reporting)
    send(trainer, loss=2.0, tokens=2048)
    assert trackio.log.mock_calls == [
        call({"train/loss": 2.0, "train/tokens": 2048, "train/global_step": 4}, step=2048)
    ]
    report_text(trainer, "a\n# b")
    assert trackio.log.mock_calls[1:] == [call({"sample": "    a\n    # b"}, step=2048)] and not caplog.records
    trackio.log.side_effect = ConnectionResetError
    for _ in range(5):
        send(trainer, loss=2.0, tokens=2048)
    assert len(caplog.records) == 3  # then it is disabled
    report_text(trainer, "a")


def test_tensorboard_uses_tokens_as_steps_and_shows_samples(monkeypatch, tmp_path: Path, caplog) -> None:
    monkeypatch.setattr(os, "environ", {"HOME": str(tmp_path)})
    prepare_tracking(["tensorboard"], tmp_path)
    assert os.environ["TENSORBOARD_LOGGING_DIR"] == str(tmp_path / "tensorboard")
    reporting, writer = object.__new__(TensorBoardCallback), Mock()
    reporting._SummaryWriter, reporting.tb_writer = None, writer
    trainer = trainer_with(reporting)
    send(trainer, loss=2.0)
    assert writer.add_scalar.mock_calls == [call("train/loss", 2.0, 2048)] and trainer.state.global_step == 4
    report_text(trainer, "a\n# b")
    assert writer.add_text.mock_calls == [call("sample", "    a\n    # b", 2048)] and not caplog.records
    writer.add_scalar.side_effect = OSError("the disk is full")
    send(trainer, loss=2.0)
    assert len(caplog.records) == 1
    reporting.tb_writer = None  # as on other ranks
    report_text(trainer, "a")
    assert len(caplog.records) == 1


@pytest.mark.parametrize(("step", "options"), [(0, {}), (4, {"purge_step": 2049})])
def test_tensorboard_hides_the_steps_that_a_resumed_run_repeats(step: int, options: dict, tmp_path: Path) -> None:
    reporting = object.__new__(TensorBoardCallback)
    writer = reporting._SummaryWriter = Mock()
    reporting.tb_writer, reporting.logging_dir = None, str(tmp_path)
    trainer = trainer_with(reporting)
    trainer.state.global_step = step
    for callback in trainer.callback_handler.callbacks:
        callback.on_train_begin(TrainingArguments(use_cpu=True), trainer.state, None)
    assert writer.mock_calls[0] == call(log_dir=str(tmp_path), **options)


@pytest.mark.parametrize("name", ["trackio", "tensorboard"])
def test_a_missing_package_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integration_utils, "get_available_reporting_integrations", lambda: ["wandb"])
    with pytest.raises(UserError, match=f"pip install {name}"):
        check_reporting([name])
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: None)
    with pytest.raises(UserError, match=f"pip install {name}"):
        check_trackers([name])
    check_trackers(["none"])


def test_warnings_about_what_every_run_does_are_hidden(caplog: pytest.LogCaptureFixture) -> None:
    cli.start_log()
    for name, text in cli.EXPECTED.items():
        logging.getLogger(name).warning("Warning: %s", text)
        logging.getLogger(name).warning("another warning")
    assert [record.getMessage() for record in caplog.records] == ["another warning"] * len(cli.EXPECTED)


def test_a_command_is_recorded_without_secrets() -> None:
    words = "--a https://me:secret@host/x --b s3://bucket/x?sig=secret --c s3://bucket/x?y"
    assert announce.SECRET.sub("://…", words) == "--a https://…host/x --b s3://… --c s3://bucket/x?y"
