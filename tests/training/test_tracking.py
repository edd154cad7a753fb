"""A tracking service may fail, vanish or be absent: the training goes on."""

import os
from types import SimpleNamespace

import pytest
from transformers import TrainerCallback

from gpt2_repro.training.tracking import FAILURES_ALLOWED, Guarded, guard_reporting, prepare_wandb, report_text


def test_failures_are_logged_and_after_three_the_service_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    events = [name for name in vars(TrainerCallback) if name.startswith("on_")]
    assert len(events) > 10
    calls: list[str] = []

    def fail(event: str):
        def call(*args: object, **kwargs: object) -> None:
            calls.append(event)
            raise ConnectionResetError("the service is gone")

        return call

    guarded = Guarded(SimpleNamespace(**{event: fail(event) for event in events}))
    for event in events:
        assert getattr(guarded, event)(None, None, None) is None
    assert calls == events[:FAILURES_ALLOWED] and len(caplog.records) == FAILURES_ALLOWED


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

    def __init__(self, wandb: FakeWandb | None) -> None:
        self._wandb = wandb

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        self._wandb.define_metric("*", step_metric="train/global_step")


Reporting.__module__ = "transformers.integrations.integration_utils"


def trainer_of(wandb: FakeWandb | None) -> SimpleNamespace:
    callbacks = SimpleNamespace(callbacks=[Reporting(wandb), TrainerCallback()])
    state = SimpleNamespace(is_world_process_zero=True, num_input_tokens_seen=2048)
    trainer = SimpleNamespace(callback_handler=callbacks, state=state)
    guard_reporting(trainer)
    return trainer


def test_wandb_draws_over_tokens_and_shows_samples(caplog: pytest.LogCaptureFixture) -> None:
    wandb = FakeWandb()
    trainer = trainer_of(wandb)
    *guarded, own = trainer.callback_handler.callbacks
    assert [type(callback) for callback in guarded] == [Guarded, Guarded] and type(own) is TrainerCallback
    for callback in guarded:
        callback.on_train_begin(None, trainer.state, None)
    assert wandb.calls == [  # the last word is ours
        ("*", {"step_metric": "train/global_step"}),
        ("train/tokens", {}),
        ("*", {"step_metric": "train/tokens", "step_sync": True}),
    ]
    report_text(trainer, "a <b> c")
    _, values = wandb.calls[-1]
    assert values["train/tokens"] == 2048 and "a &lt;b&gt; c" in values["sample"]
    assert not caplog.records
    report_text(trainer_of(None), "a sample that wandb refuses costs nothing")
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("name", "value", "mode"),
    [("WANDB_DIR", "", "offline"), ("WANDB_API_KEY", "k", None), ("WANDB_MODE", "disabled", "disabled")],
)
def test_without_a_key_nothing_asks_for_one(name: str, value: str, mode: str | None, monkeypatch, tmp_path) -> None:
    for variable in ("WANDB_MODE", "WANDB_DIR", "WANDB_RUN_ID", "WANDB_RESUME"):
        monkeypatch.setenv(variable, "")  # to be put back afterwards, whatever is set meanwhile
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
