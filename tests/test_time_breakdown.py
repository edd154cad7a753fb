"""Where the paid minutes went."""

from gpt2_repro.time_breakdown import ACCOUNTS, bill, bill_lines


def test_the_bill_has_what_was_used_and_the_whole() -> None:
    lines = bill({"startup": 60, "steps": 5400, "data_wait": 0, "saves": 540}, usd_per_hour=14)
    assert [line.name for line in lines] == ["start-up", "training steps", "saving", "in all"]
    assert [round(line.share, 2) for line in lines] == [0.01, 0.9, 0.09, 1]
    assert [line.usd and round(line.usd, 2) for line in lines] == [0.23, 21, 2.1, 23.33]
    assert bill({}, usd_per_hour=1) == [] and all(line.usd is None for line in bill({"steps": 1}, usd_per_hour=0))
    assert sum(line.seconds for line in lines[:-1]) == lines[-1].seconds == 6000


def test_the_lines_are_aligned() -> None:
    assert bill_lines({"steps": 5405.24, "validation": 59.96}, usd_per_hour=14) == [
        "training steps      90:05   98.9%    $21.02",
        "validation           1:00    1.1%     $0.23",
        "in all              91:05  100.0%    $21.25",
    ]
    assert bill_lines({"steps": 4}, usd_per_hour=0)[0] == "training steps       0:04  100.0%"
    assert len(ACCOUNTS) == len(set(ACCOUNTS.values()))
