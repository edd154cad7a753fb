"""A profile shows the largest kernels, and how long no kernel ran."""

from types import SimpleNamespace

import pytest
import torch

from benchmarks.stopwatch import largest_kernels


def test_overlapping_kernels_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.autograd.DeviceType.CPU
    spans = [("gemm", 0, 40), ("copy", 20, 50), ("gemm", 90, 100)]  # microseconds; idle from 50 to 90
    events = [
        SimpleNamespace(name=name, device_type=cpu, time_range=SimpleNamespace(start=start, end=end))
        for name, start, end in spans
    ]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert largest_kernels(events) == {
        "busy": pytest.approx(0.6),
        "ms": pytest.approx(0.1),
        "kernels": [{"kernel": "gemm", "ms": 0.05, "calls": 2}, {"kernel": "copy", "ms": 0.03, "calls": 1}],
    }
