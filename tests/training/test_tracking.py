"""A tracking service may fail, vanish or be absent: the training goes on."""

from pathlib import Path

import pytest
from transformers import TrainerCallback

from gpt2_repro.training.tracking import FAILURES_ALLOWED, Guarded, prepare_wandb


class Failing(TrainerCallback):
    def __init__(self) -> None:
        self.calls: list[str] = []

    def on_log(self, args, state, control, **kwargs) -> None:
        self.calls.append("on_log")
        raise ConnectionResetError("the service is gone")

    def on_train_end(self, args, state, control, **kwargs) -> None:
        self.calls.append("on_train_end")


def test_failures_are_logged_and_after_three_the_service_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    service = Failing()
    guarded = Guarded(service)
    for _ in range(5):
        assert guarded.on_log(None, None, None, logs={}) is None
    guarded.on_train_end(None, None, None)
    assert service.calls == ["on_log"] * FAILURES_ALLOWED
    assert len(caplog.records) == FAILURES_ALLOWED
    assert "ConnectionResetError: the service is gone; it is left out" in caplog.records[-1].getMessage()


def test_every_event_is_guarded() -> None:
    events = [name for name in vars(TrainerCallback) if name.startswith("on_")]
    assert len(events) > 10
    assert all(getattr(Guarded, name) is not getattr(TrainerCallback, name) for name in events)


@pytest.mark.parametrize(
    ("set_before", "mode"), [({}, "offline"), ({"WANDB_API_KEY": "k"}, None), ({"WANDB_MODE": "disabled"}, "disabled")]
)
def test_without_a_key_nothing_asks_for_one(monkeypatch, tmp_path: Path, set_before: dict, mode: str | None) -> None:
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_DIR", "WANDB_RUN_ID", "WANDB_RESUME"):
        monkeypatch.setenv(name, "")  # to be put back afterwards, whatever is set meanwhile
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    for name, value in set_before.items():
        monkeypatch.setenv(name, value)
    import os

    prepare_wandb(["none"], tmp_path)
    assert os.environ.get("WANDB_DIR") is None
    prepare_wandb(["wandb"], tmp_path)
    assert os.environ.get("WANDB_MODE") == mode and os.environ["WANDB_DIR"] == str(tmp_path)
    first = os.environ.pop("WANDB_RUN_ID")
    prepare_wandb(["wandb"], tmp_path)
    assert os.environ["WANDB_RUN_ID"] == first and os.environ["WANDB_RESUME"] == "allow"
