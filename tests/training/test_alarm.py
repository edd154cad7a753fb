"""Losses that get worse, slowly."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpt2_repro.training.alarm import DivergenceAlarm, Trend


def trend_of(*events: dict) -> Trend:
    trend = Trend()
    for event in events:
        trend.see(event)
    return trend


def validations(*losses: float) -> list[dict]:
    return [{"step": 10 * step, "eval_loss": loss} for step, loss in enumerate(losses)]


@pytest.mark.parametrize(
    ("losses", "alarm"),
    [
        ((3.0, 3.1, 3.2), False),
        ((3.0, 3.1, 3.2, 3.3), True),
        ((3.0, 3.1, 3.2, 3.2), False),
        ((3.0, 3.1, 3.2, 3.3, 3.2), False),
        ((4.0, 3.9, 3.0, 3.1, 3.2, 3.3), True),
        ((3.0, 3.1, math.nan, 3.3, 3.4), False),
    ],
)
def test_the_third_rise_in_a_row_is_one(losses: tuple[float, ...], alarm: bool) -> None:
    assert (trend_of(*validations(*losses)).alarm is not None) is alarm


def test_a_training_loss_far_above_its_best_is_one_and_noise_is_none() -> None:
    falling = [{"step": step, "loss": 8 - step / 100 + (step % 3 - 1) * 0.9} for step in range(1, 401)]
    trend = trend_of(*falling)
    assert trend.alarm is None
    trend.see({"step": 401, "loss": math.nan})
    trend.see({"step": 402, "loss": 20.0})  # a spike
    assert trend.alarm is None
    for step in range(403, 600):
        trend.see({"step": step, "loss": 6.0})
    assert trend.alarm and trend.alarm.startswith("the training loss over the last 100 steps is 5.")
    for step in range(600, 1200):
        trend.see({"step": step, "loss": 4.0})
    assert trend.alarm is None


def test_lines_every_ten_steps_weigh_ten_steps() -> None:
    dense = trend_of(*({"step": step, "loss": 5.0 if step <= 100 else 6.0} for step in range(1, 201)))
    sparse = trend_of(*({"step": step, "loss": 5.0 if step <= 100 else 6.0} for step in range(10, 201, 10)))
    assert dense._smoothed == pytest.approx(sparse._smoothed, abs=1e-9)


def test_the_log_is_the_memory_of_the_alarm(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log, told = tmp_path / "metrics.jsonl", []
    log.write_text("".join(json.dumps(event) + "\n" for event in validations(3.0, 3.1, 3.2)))
    alarm = DivergenceAlarm(log, lambda *said: told.append(said))
    state = SimpleNamespace(global_step=30, is_world_process_zero=True)
    alarm.replay()
    alarm.on_log(None, state, None, logs={"eval_loss": 3.3, "tokens": 1})
    alarm.on_log(None, state, None, logs={"loss": 3.3})
    ((step, event),) = told
    assert step == 30 and event["alarm"] == "the validation loss has risen 3 times in a row, from 3.0000 to 3.3000"
    assert "step 30: the validation loss has risen" in caplog.text
    again = DivergenceAlarm(log, lambda *said: pytest.fail("told again"))
    log.write_text("".join(json.dumps(event) + "\n" for event in validations(3.0, 3.1, 3.2, 3.3)))
    again.replay()
    again.on_log(None, state, None, logs={"loss": 3.3})
    assert again.trend.alarm == event["alarm"]
