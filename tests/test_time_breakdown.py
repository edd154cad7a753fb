"""The time of a run by account."""

import pytest

from gpt2_repro.time_breakdown import breakdown, breakdown_lines


def test_used_accounts_and_the_total() -> None:
    lines = breakdown({"startup": 60, "training": 5400, "data": 0, "saving": 540}, usd_per_hour=14)
    assert [line.seconds for line in lines] == [60, 5400, 540, 6000]
    assert [line.share for line in lines] == pytest.approx([0.01, 0.9, 0.09, 1])
    assert [line.usd for line in lines] == pytest.approx([0.2333, 21, 2.1, 23.3333], abs=1e-4)
    assert breakdown({}, usd_per_hour=1) == []
    assert all(line.usd is None for line in breakdown({"training": 1}, usd_per_hour=0))


def test_lines_are_aligned() -> None:
    lines = breakdown_lines({"training": 5405.24, "validation": 59.96}, usd_per_hour=14)
    assert [line.split()[-2:] for line in lines] == [["98.9%", "$21.02"], ["1.1%", "$0.23"], ["100.0%", "$21.25"]]
    assert len({len(line) for line in lines}) == 1
