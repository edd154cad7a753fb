"""A process that shows no sign of life ends with its stacks; tests/faults/test_hangs.py has one that hangs."""

import faulthandler

import pytest
from transformers import TrainerCallback

from gpt2_repro.training.when import Watchdog


def test_signs_of_life_put_the_end_off(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda seconds, exit: calls.append((seconds, exit)))
    monkeypatch.setattr(faulthandler, "cancel_dump_traceback_later", lambda: calls.append("cancelled"))
    signs = {name for name in vars(Watchdog) if name.startswith("on_")}
    assert signs >= {"on_substep_end", "on_step_end", "on_prediction_step", "on_save", "on_evaluate"}
    assert signs <= set(dir(TrainerCallback))
    for watchdog in (Watchdog(600), Watchdog(0)):  # 0 is never
        for sign in signs:
            getattr(watchdog, sign)(None, None, None)
        watchdog.disarm()
    assert calls == [(600, True)] * len(signs) + ["cancelled"] * 2
