"""A tracking service may fail, vanish or be absent: the training goes on."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import TrainerCallback

from gpt2_repro.training.tracking import (
    FAILURES_ALLOWED,
    Guarded,
    WandbPage,
    guard_reporting,
    prepare_wandb,
    report_text,
)


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
    assert "ConnectionResetError: the service is gone; it is disabled" in caplog.records[-1].getMessage()


def test_every_event_is_guarded() -> None:
    events = [name for name in vars(TrainerCallback) if name.startswith("on_")]
    assert len(events) > 10
    assert all(getattr(Guarded, name) is not getattr(TrainerCallback, name) for name in events)


class FakeWandb:
    def __init__(self) -> None:
        self.calls: list[tuple] = []

    def define_metric(self, name: str, **options: object) -> None:
        self.calls.append((name, options))

    def log(self, values: dict) -> None:
        self.calls.append(("log", values))

    @staticmethod
    def Html(text: str) -> str:
        return text


class Reporting(TrainerCallback):
    """As transformers' callback: it has the library, and defines its own axis when the training begins."""

    def __init__(self, wandb: FakeWandb) -> None:
        self._wandb = wandb

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        self._wandb.define_metric("*", step_metric="train/global_step")


Reporting.__module__ = "transformers.integrations.integration_utils"


def test_wandb_draws_over_tokens_and_shows_samples() -> None:
    wandb = FakeWandb()
    state = SimpleNamespace(is_world_process_zero=True, num_input_tokens_seen=2048)
    trainer = SimpleNamespace(callback_handler=SimpleNamespace(callbacks=[Reporting(wandb), Failing()]), state=state)
    guard_reporting(trainer)
    kinds = [type(callback) for callback in trainer.callback_handler.callbacks]
    assert kinds == [Guarded, Guarded, Failing]
    for callback in trainer.callback_handler.callbacks[:2]:
        callback.on_train_begin(None, state, None)
    assert wandb.calls == [  # the last word is ours
        ("*", {"step_metric": "train/global_step"}),
        ("train/tokens", {}),
        ("*", {"step_metric": "train/tokens", "step_sync": True}),
    ]
    wandb.calls.clear()
    report_text(trainer, "a <b> c")
    ((_, values),) = wandb.calls
    assert values["train/tokens"] == 2048 and "a &lt;b&gt; c" in values["sample"]


def test_a_sample_that_wandb_refuses_costs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    page = Guarded(WandbPage(None))
    trainer = SimpleNamespace(
        callback_handler=SimpleNamespace(callbacks=[page]), state=SimpleNamespace(num_input_tokens_seen=1)
    )
    report_text(trainer, "text")
    assert page.failures == 1 and "WandbPage failed in show" in caplog.text


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
