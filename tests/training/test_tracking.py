"""Training continues if a tracking service fails, or if wandb has no API key."""

import os
from types import SimpleNamespace
from unittest.mock import Mock, call

import pytest
from transformers import TrainerCallback

from gpt2_repro.training.tracking import FAILURES_ALLOWED, Guarded, guard_reporting, prepare_wandb, report_text


def test_service_is_disabled_after_three_failures(caplog: pytest.LogCaptureFixture) -> None:
    events = [name for name in vars(TrainerCallback) if name.startswith("on_")]
    assert len(events) > 10
    service = Mock(**{f"{event}.side_effect": ConnectionResetError("the service is gone") for event in events})
    guarded = Guarded(service)
    for event in events:
        assert getattr(guarded, event)(None, None, None) is None
    called = [name for name, _, _ in service.mock_calls]
    assert called == events[:FAILURES_ALLOWED] and len(caplog.records) == FAILURES_ALLOWED


class Reporting(TrainerCallback):
    """A stand-in for the wandb callback of transformers."""

    def __init__(self, wandb: Mock) -> None:
        self._wandb = wandb

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        # As in the wandb callback, the step becomes the horizontal axis.
        self._wandb.define_metric("*", step_metric="train/global_step")


Reporting.__module__ = "transformers.integrations.integration_utils"


def test_wandb_uses_a_token_axis_and_shows_samples(caplog: pytest.LogCaptureFixture) -> None:
    wandb = Mock(Html=str)
    state = SimpleNamespace(is_world_process_zero=True, num_input_tokens_seen=2048)
    handler = SimpleNamespace(callbacks=[Reporting(wandb), TrainerCallback()])
    trainer = SimpleNamespace(callback_handler=handler, state=state)
    guard_reporting(trainer)
    assert [type(callback) for callback in handler.callbacks] == [Guarded, Guarded, TrainerCallback]
    for callback in handler.callbacks:
        callback.on_train_begin(None, state, None)
    axes = [("*", {"step_metric": "train/global_step"}), ("train/tokens", {})]
    axes += [("*", {"step_metric": "train/tokens", "step_sync": True})]  # our axis is defined last
    assert wandb.mock_calls == [call.define_metric(name, **options) for name, options in axes]
    report_text(trainer, "a <b> c")
    (values,) = wandb.log.call_args.args
    assert values["train/tokens"] == 2048 and "a &lt;b&gt; c" in values["sample"]
    assert not caplog.records
    wandb.log.side_effect = ConnectionResetError("a sample that wandb refuses costs nothing")
    report_text(trainer, "a")
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("name", "value", "mode"),
    [("WANDB_DIR", "", "offline"), ("WANDB_API_KEY", "k", None), ("WANDB_MODE", "disabled", "disabled")],
)
def test_wandb_without_a_key_does_not_prompt(name: str, value: str, mode: str | None, monkeypatch, tmp_path) -> None:
    for variable in ("WANDB_MODE", "WANDB_DIR", "WANDB_RUN_ID", "WANDB_RESUME"):
        monkeypatch.setenv(variable, "")  # monkeypatch then restores the variable after the test
        monkeypatch.delenv(variable)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    prepare_wandb(["none"], tmp_path)
    assert "WANDB_DIR" not in os.environ
    if value:
        monkeypatch.setenv(name, value)
    prepare_wandb(["wandb"], tmp_path)
    assert os.environ.get("WANDB_MODE") == mode and os.environ["WANDB_DIR"] == str(tmp_path)
    first = os.environ.pop("WANDB_RUN_ID")
    prepare_wandb(["wandb"], tmp_path)
    assert os.environ["WANDB_RUN_ID"] == first and os.environ["WANDB_RESUME"] == "allow"
