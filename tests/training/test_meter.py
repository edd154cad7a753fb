"""The time breakdown is complete, and the speed counts only training time."""

import time

import pytest

from gpt2_repro.batch_plan import BatchPlan
from gpt2_repro.hardware import Accelerator
from gpt2_repro.run_record.environment import Environment
from gpt2_repro.run_record.status import process_seconds
from gpt2_repro.run_record.time_breakdown import PARTS, breakdown, goodput
from gpt2_repro.training.meter import Meter


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def test_every_second_is_counted_once(clock: list[float]) -> None:
    meter = Meter(Environment(), compiled=True)
    before = meter.seconds("startup")
    assert 0 < before <= process_seconds()
    clock[0] += 5
    with meter.on("validation"):  # before the first step
        clock[0] += 2
        with meter.on("saving"):
            clock[0] += 3
        clock[0] += 4
    meter.start(0)  # this step compiles
    clock[0] += 20
    meter.start(0)
    clock[0] += 10
    with meter.on("data"):
        clock[0] += 1
    with pytest.raises(KeyError), meter.on("saving"):
        clock[0] += 7
        raise KeyError
    clock[0] += 0.5
    found = {name: seconds for name, seconds in meter.time_breakdown().items() if seconds}
    assert found.pop("startup") == pytest.approx(before + 25, abs=0.01)
    assert found == {"validation": 6, "training": 10.5, "data": 1, "saving": 10}
    assert meter.seconds(*PARTS) == pytest.approx(before + clock[0] - 100)


@pytest.mark.parametrize(
    ("precision", "peak", "mfu"), [("bf16", 1e5 / 8, {"mfu": 0.5}), ("fp32", 1e5 / 8, {}), ("bf16", None, {})]
)
def test_speed_counts_training_time_only(precision: str, peak: float | None, mfu: dict, clock: list[float]) -> None:
    gpus, plan = Accelerator("cuda", "GPU", 8, peak, None), BatchPlan(8192, 1024, 1, 8, 1, 10)
    meter = Meter(Environment(accelerator=gpus, plan=plan, flops_per_token=50, precision=precision))
    assert meter.read(0) == {}
    clock[0] += 1000
    meter.start(5000)
    clock[0] += 6
    with meter.on("data"):
        clock[0] += 2
    with meter.on("validation"):
        clock[0] += 1000
    assert meter.read(13_000) == {"tokens_per_second": 1000.0, "data_wait": 0.25, **mfu}
    clock[0] += 8
    assert meter.read(21_000) == {"tokens_per_second": 1000.0, "data_wait": 0.0, **mfu}


def test_goodput_counts_only_the_steps_that_were_kept() -> None:
    parts = {"startup": 20, "training": 100, "data": 20, "redone": 40, "saving": 20}
    assert goodput(parts) == 0.6 and goodput({}) == 0
    assert breakdown(parts, usd_per_hour=3.6)[-2:] == [
        ["total", "3 min 20 s", "100.0%", "$0.20"],
        ["goodput: training+data", "2 min", "60.0%", "$0.12"],
    ]
