"""Hours and dollars: the figures of the published runs come out."""

import dataclasses
import math
import re
from pathlib import Path
from typing import Any

import pytest

from gpt2_repro.compute import gpt2_scale
from gpt2_repro.errors import UserError
from gpt2_repro.preflight.cost import Work, budget, is_as_published, plan_lines, plan_on, ranking, work_of
from gpt2_repro.preflight.prices import card_of, card_table, price_table
from gpt2_repro.training.arguments import PretrainingArguments


STEPS, TOKENS = 18_865, 524_288
WORK = Work(
    tokens=STEPS * TOKENS,
    steps=STEPS,
    flops=8.46e18,
    eval_tokens=10_485_760,
    validations=77,
    hellaswag_tokens=3_034_080,
    hellaswag_passes=20,
    samples=20,
    save_steps=2000,
    save_minutes=15,
    checkpoint_bytes=1_991_614_464,
    final_bytes=497_759_232,
    keep_checkpoints=2,
    keep_every_steps=0,
)


def test_a_budget_has_everything_that_is_paid() -> None:
    entries = {entry.name: entry for entry in budget(WORK, 8 * 218_500, basis="published")}
    assert entries["training steps"].minutes == pytest.approx(94.3, abs=0.1)
    assert entries["training steps"].basis == "published" and entries["boot"].basis == "assumed"
    # 77 validations of a third of 10,485,760 tokens each; 20 passes over HellaSwag.
    assert entries["validation"].minutes == pytest.approx(77 * 10_485_760 / 3 / (8 * 218_500) / 60)
    assert entries["HellaSwag"].minutes == pytest.approx(20 * 3_034_080 / 3 / (8 * 218_500) / 60)
    # Ten checkpoints by steps of 9.4 minutes in all; twenty samples; one checkpoint and the model at 50 MB/s.
    assert entries["saving"].minutes == pytest.approx(10 * 2 / 60) and entries["samples"].minutes == pytest.approx(0.2)
    assert entries["sync"].minutes == pytest.approx((1_991_614_464 + 497_759_232) / 50e6 / 60)


def test_a_slow_machine_saves_by_minutes() -> None:
    # 20 h on one card: 2,000 steps take 126 minutes, and a checkpoint is due after 15.
    assert WORK.saves(60 * 19.8) == 1 + 79 and WORK.saves(94) == 10
    assert dataclasses.replace(WORK, save_steps=0).saves(94) == 0
    assert dataclasses.replace(WORK, save_minutes=0).saves(60 * 19.8) == 10


def test_the_disk_holds_what_is_kept() -> None:
    a, final = WORK.checkpoint_bytes, WORK.final_bytes
    assert WORK.run_bytes == 4 * a + final
    assert dataclasses.replace(WORK, keep_checkpoints=0).run_bytes == 12 * a + final  # all ten
    assert dataclasses.replace(WORK, keep_every_steps=5000).run_bytes == (4 + 3) * a + final


def training(**changed: Any) -> dict[str, Any]:
    fields = dataclasses.fields(PretrainingArguments)
    return {field.name: field.default for field in fields} | {"stop_at_step": 0} | changed


def work(**changed: Any) -> Work:
    scale = gpt2_scale(n_layer=12, n_embd=768, sequence_length=1024, vocab_size=50_257, pad_to_multiple_of=128)
    return work_of(training(**changed), scale, validation_tokens=100_000_000, hellaswag_tokens=3_034_080)


def test_the_work_of_a_recipe() -> None:
    found = work(hellaswag_steps=1000)
    assert (found.steps, found.tokens, found.validations, found.hellaswag_passes, found.samples) == (
        *(18_865, STEPS * TOKENS, 77, 20, 20),
    )
    assert found.flops == pytest.approx(8.46e18, rel=0.01) and found.final_bytes == 4 * 124_439_808
    assert found.checkpoint_bytes == pytest.approx(16 * 124_475_904, rel=0.001)
    # A run that is stopped takes what it takes to there.
    assert work(stop_at_step=1000).tokens == 1000 * TOKENS and work(stop_at_step=1000).validations == 5
    # Samples and HellaSwag come with validations, never more often.
    assert work(sample_steps=10).samples == 77 and work(hellaswag_steps=10).hellaswag_passes == 77
    assert work(sample_tokens=0).samples == work(eval_strategy="no", hellaswag_steps=10).hellaswag_passes == 0
    # The whole split, and no more than there is.
    assert work(eval_tokens=0).eval_tokens == 100_000_000 and work(eval_tokens=10**12).eval_tokens == 100_000_000
    assert work(save_strategy="no").save_steps == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"eval_steps": -5},
        {"save_steps": 0},
        {"tokens_per_step": 0},
        {"total_tokens": 100},
        {"max_steps": -1},
        {"keep_checkpoints": -3},
        {"per_device_train_batch_size": -1},
        {"save_minutes": float("nan")},
    ],
)
def test_counts_that_make_no_run_are_mistakes(wrong: dict[str, Any]) -> None:
    with pytest.raises(UserError):
        work(**wrong)


def test_another_way_of_computing_has_no_published_speed() -> None:
    for same in ({}, {"torch_compile": True}):
        assert is_as_published(training(**same), model_type="gpt2")
        assert not is_as_published(training(**same), model_type="llama")
    for changed in ({"bf16": False}, {"activation_checkpointing": True}, {"torch_compile": False}):
        assert not is_as_published(training(**changed), model_type="gpt2")
    slower = plan_on(WORK, "RTX 4090", 1, usd_per_hour=0, tokens_per_second=None, as_published=False)
    assert slower["budget"] == [] and slower["usd"] is None
    typed = plan_on(WORK, "RTX 4090", 1, usd_per_hour=0, tokens_per_second=1e5, as_published=False)
    assert typed["minutes"] == pytest.approx(sum(entry["minutes"] for entry in typed["budget"]))
    assert typed["usd"] == pytest.approx(typed["minutes"] / 60 * 0.69)


def lines(planned: dict[str, Any]) -> str:
    return "\n".join(plan_lines(planned | {"data_bytes": 1e9}))


def test_a_card_that_nobody_has_measured_has_no_hours() -> None:
    planned = plan_on(WORK, "Tesla T4", 1, usd_per_hour=0.0, tokens_per_second=None)
    assert planned["budget"] == [] and "--tokens_per_second" in lines(planned)
    typed = plan_on(WORK, "Tesla T4", 1, usd_per_hour=0.5, tokens_per_second=20_000.0)
    assert typed["speed"] == "as typed" and {entry["basis"] for entry in typed["budget"]} == {"typed", "assumed"}


def test_what_nobody_measured_is_called_an_estimate() -> None:
    def plan(work: Work, card: str) -> dict:
        return plan_on(work, card, 1, usd_per_hour=0, tokens_per_second=None)

    def basis(planned: dict) -> str:
        return next(entry["basis"] for entry in planned["budget"] if entry["name"] == "training steps")

    assert basis(plan(WORK, "H100 SXM")) == "published" and basis(plan(WORK, "H100 PCIe")) == "estimated"
    # A model of three times the FLOPs a token trains a third of the tokens in the same time.
    larger = plan(dataclasses.replace(WORK, flops=3 * 855e6 * WORK.tokens), "H100 SXM")
    assert larger["machine"]["tokens_per_second"] == pytest.approx(468_000 / 3) and basis(larger) == "estimated"
    assert larger["speed"].endswith("by this model's FLOPs a token")
    assert larger["machine"]["micro_batch"] is None  # the table's are of 124M


def test_every_card_has_its_source_and_every_price_its_card() -> None:
    for card in card_table():
        assert card.speed and card.micro_batch_is in ("measured", "estimated")
        # Rows that fit in half of the memory beside 4 GB of weights and optimizer, at 329 KiB a token (benchmarks/RESULTS.md).
        rows = (card.memory_gb / 2 - 4) * 1e9 / (329 * 1024 * 1024)
        assert card.micro_batch == min(64, 2 ** int(math.log2(rows)))
        assert 50_000 < card.tokens_per_second < 2e6 and card.memory_gb >= 24
    assert all(card_of(price.card) is not None for price in price_table())


def test_the_page_has_the_cheapest_price_of_each_card() -> None:
    page = (Path(__file__).parents[2] / "docs" / "cost.md").read_text()
    rows = re.findall(
        r"^\| ([\w ]+?)( \*)? \| ([\d.]+) \| ([\w ]+), \$([\d.]+)[\w ]* \| ([\d.]+) \| (.+) \|$",
        page,
        flags=re.MULTILINE,
    )
    best: dict[str, dict] = {}
    for offer in ranking():
        best.setdefault(offer["card"], offer)
    assert [row[0] for row in rows] == list(best)
    for card, star, hours_of_one, provider, price, dollars, source in rows:
        offer = best[card]
        assert bool(star) is offer["speed"].startswith("estimated")
        assert (float(hours_of_one), float(dollars)) == (round(offer["hours"], 1), round(offer["usd"], 2))
        assert provider == offer["provider"] and float(price) == offer["usd_per_hour"]
        assert source in (str(offer["date"]), offer["source"])
