"""Training continues if a tracking service fails, or if wandb has no API key."""

import os
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock, call

import pytest
import torch
from transformers import TrainerCallback, TrainerState, TrainingArguments
from transformers.integrations.integration_utils import WandbCallback

from gpt2_repro.training.tracking import guard_reporting, prepare_wandb, report_text


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
    prepare_wandb(["none"], tmp_path)
    assert "WANDB_DIR" not in os.environ
    prepare_wandb(["wandb"], tmp_path)
    assert os.environ.get("WANDB_MODE") == mode and os.environ["WANDB_DIR"] == str(tmp_path)
    first = os.environ.pop("WANDB_RUN_ID")
    prepare_wandb(["wandb"], tmp_path)
    assert os.environ["WANDB_RUN_ID"] == first and os.environ["WANDB_RESUME"] == "allow"
