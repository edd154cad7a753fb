"""Estimated hours and dollars match published runs, and each number has a source."""

from typing import Any

import pytest

from gpt2_repro.data.sources.presets import PRESETS
from gpt2_repro.hardware import PEAK_FLOPS
from gpt2_repro.model.size import gpt2_scale
from gpt2_repro.planning.compute_optimal import Choice, choose, expected_loss
from gpt2_repro.planning.cost import CARDS, PRICES, RunCost, Workload, cards_named, cost_of, price_of
from gpt2_repro.planning.memory import MemoryEstimate, MemoryTrial
from gpt2_repro.planning.workload import workload_of
from tests.sections import parse_for_training


TOKENS = 18_865 * 524_288
ROWS = {"sequence_length": 1024, "vocab_size": 50_257, "pad_to_multiple_of": 128}


def work(**changed: Any) -> Workload:
    """Return the workload of the default recipe, as if no data were prepared.

    `changed` contains options of train.py that replace values of the recipe.
    """
    words = [word for name, value in changed.items() for word in (f"--{name}", str(value))]
    return workload_of(parse_for_training(*words, "--dataset_dir", "data/nowhere"))


def test_the_size_of_a_mixture_is_that_of_its_shortest_source() -> None:
    stories = PRESETS["tinystories"].tokens
    for source, tokens in (
        ("tinystories=0.5,fineweb-10bt=0.5", stories / 0.5),
        ("tinystories=1,fineweb-10bt=3", stories / 0.25),
        ("tinystories=1x2,fineweb-10bt=3", 2 * stories / 0.25),
    ):
        assert work(source=source).data_bytes == pytest.approx(2 * tokens)


def minutes(planned: RunCost) -> dict[str, float]:
    return {activity.name: activity.minutes for activity in planned.budget}


def test_the_work_of_a_recipe() -> None:
    found = work()
    assert (found.steps, found.tokens, found.samples, found.saves) == (18_865, TOKENS, 20, 10)
    assert (found.eval_tokens, found.hellaswag_tokens) == (77 * 10_485_760, 20 * 3_034_080)
    assert found.flops == pytest.approx(8.46e18, rel=0.01) and found.final_bytes == 4 * 124_439_808
    assert found.checkpoint_bytes == pytest.approx(16 * 124_475_904, rel=0.001)
    stopped = work(stop_at_step=1000)
    assert (stopped.tokens, stopped.eval_tokens) == (1000 * 524_288, 5 * 10_485_760)
    # Samples and HellaSwag run only at validations, never more often.
    assert work(sample_steps=10).samples == 77 and work(hellaswag_steps=10).hellaswag_tokens == 77 * 3_034_080
    assert work(sample_tokens=0).samples == work(eval_strategy="no", hellaswag_steps=10).hellaswag_tokens == 0
    # eval_tokens 0 means the complete split; a number above its size is reduced to its size.
    assert work(eval_tokens=0).eval_tokens == work(eval_tokens=10**12).eval_tokens == 77 * 100_000_000
    # After the first step, the averaged weights are validated too. Further sets are validated as often.
    assert work(ema_steps=100).eval_tokens == 153 * 10_485_760
    assert work(validation_sets="books=pg19").eval_tokens == 2 * 77 * 10_485_760


@pytest.mark.parametrize("changed", [{"n_layer": 24}, {"model_type": "llama", "n_layer": 6}, {"sequence_length": 512}])
def test_the_speed_of_another_model_is_scaled_by_its_flops(changed: dict[str, Any]) -> None:
    spent = minutes(cost_of(work(**changed), "H100 SXM", 1))
    assert 60 * spent["training steps"] == pytest.approx(work(**changed).flops / 855e6 / 500_000, rel=0.001)
    assert cost_of(work(model_type="mixtral"), "H100 SXM", 1).minutes is None  # not known for a mixture


def test_the_disk_holds_what_is_kept() -> None:
    one, final = work().checkpoint_bytes, work().final_bytes
    for changed, kept in (({}, 2), ({"keep_checkpoints": 0}, 10), ({"keep_every_steps": 5000}, 2 + 3)):
        # Three more: the rolling checkpoint, the best checkpoint and the checkpoint being written.
        assert work(**changed).run_bytes == (kept + 3) * one + final
        assert work(**changed, save_rolling_minutes=0.0).run_bytes == (kept + 2) * one + final


def test_a_budget_has_everything_that_is_paid() -> None:
    planned = cost_of(work(), "A100 SXM 80 GB", 8)
    speed, spent = 8 * 182_000, minutes(planned)
    assert spent["training steps"] == pytest.approx(18_865 * 32 * 0.090 / 8 / 60, rel=0.01)  # 90 ms for 16 rows
    assert spent["validation"] == pytest.approx(77 * 10_485_760 / 3 / speed / 60)
    assert spent["HellaSwag"] == pytest.approx(20 * 3_034_080 / 3 / speed / 60)
    # 10 checkpoints at 2 s each, 20 samples at 0.6 s each; the newest two checkpoints, the best one and the final model
    # copied at 50 MB/s.
    assert (spent["saving"], spent["samples"]) == pytest.approx((10 * 2 / 60, 0.2))
    assert spent["sync"] == pytest.approx((3 * work().checkpoint_bytes + work().final_bytes) / 50e6 / 60)
    assert work(keep_best_checkpoint="false").kept == work(eval_strategy="no").kept == 2
    assert work(keep_checkpoints=0).kept == 10
    assert planned.minutes == pytest.approx(sum(spent.values()))
    assert planned.usd == pytest.approx(planned.minutes / 60 * 8 * 1.79)
    # On one GPU 2,000 steps take longer than 15 minutes, so checkpoints are saved by time.
    slow = minutes(cost_of(work(), "A100 SXM 80 GB", 1))
    assert slow["saving"] == pytest.approx((1 + slow["training steps"] // 15) * 2 / 60)


def test_several_gpus_share_the_scoring_of_an_evaluation() -> None:
    """evaluate.sh starts one process per GPU. Only the time until they have started stays the same."""
    of_cards = {cards: minutes(cost_of(work(), "H100 SXM", cards))["evaluation"] for cards in (1, 2, 4, 8)}
    start = 2 * of_cards[2] - of_cards[1]
    assert 0 < start < of_cards[1]
    for cards, spent in of_cards.items():
        assert spent == pytest.approx(start + (of_cards[1] - start) / cards)
    assert minutes(cost_of(work(), "H100 SXM", 16))["evaluation"] == of_cards[8]  # on one of two machines
    # The start is the same for a larger model, which takes longer to score.
    larger = {cards: minutes(cost_of(work(n_layer=48), "H100 SXM", cards))["evaluation"] for cards in (1, 2)}
    assert larger[1] > of_cards[1] and 2 * larger[2] - larger[1] == pytest.approx(start)


def test_the_network_between_machines_costs_time() -> None:
    """Each step is longer by what a ring needs for the gradients, as published for 125M parameters on 2 machines."""
    steps = TOKENS // 524_288
    for machines, share in ((2, 0.5), (4, 0.75)):
        work_of_124m = work(per_device_train_batch_size=16)
        spent = minutes(cost_of(work_of_124m, "H100 SXM", 8 * machines))["training steps"]
        alone = TOKENS / (8 * machines * 500_000)
        extra = 60 * spent - alone
        assert extra / steps == pytest.approx(2 * share * 0.0173 * 124_475_904 / 125.3e6)
    planned = cost_of(work(), "H100 SXM", 16)
    assert "assumed" in planned.speed
    assert {activity.basis for activity in planned.budget} == {"assumed"}
    assert planned.usd_per_hour == pytest.approx(16 * 3.99)
    # A speed that was passed is that of all machines.
    typed = minutes(cost_of(work(), "H100 SXM", 16, speed=1e6))["training steps"]
    assert 60 * typed == pytest.approx(TOKENS / 1e6)


def test_the_memory_of_a_pass() -> None:
    found, shape = work(), {"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "sequence_length": 1024, "chunk": 4096}
    one = MemoryEstimate(**shape, parameters=found.parameters, vocab_size=found.vocab_size, ranks=1)
    # 20 bytes per parameter, 65,536 tokens x 768 x 413.2 bytes, 2 bytes per logit of 4,096 tokens, 2.6 GB.
    by_hand = 2_489_518_080 + 65_536 * 768 * 413.2 + 412_090_368 + 2_600_000_000
    assert one.bytes_of(MemoryTrial(64)) == pytest.approx(by_hand, abs=1)
    # With 8 ranks: 9.5 bytes per parameter. With activation checkpointing: 34.1 + 2 x 12 + 4 bytes instead of 413.2.
    assert one._replace(ranks=8).bytes_of(MemoryTrial(64)) == pytest.approx(by_hand - 124_475_904 * 10.5, abs=1)
    assert one.bytes_of(MemoryTrial(64, True)) == pytest.approx(by_hand - 65_536 * 768 * (413.2 - 62.1), abs=1)
    # DDP: 18 bytes per parameter, and 38.1 x 12 + 6 bytes of activations.
    ddp = by_hand - 124_475_904 * 2 + 65_536 * 768 * (463.2 - 413.2)
    assert one._replace(sharded=False).bytes_of(MemoryTrial(64)) == pytest.approx(ddp, abs=1)
    assert one.largest(MemoryTrial(64), 512, 24e9) == MemoryTrial(32)
    assert one._replace(n_layer=200).largest(MemoryTrial(64), 512, 10e9) == MemoryTrial(8, True)


def test_a_card_is_found_by_whole_words() -> None:
    cards = {f"NVIDIA {name}": [name] for name in ("H100 PCIe", "H100 NVL", "H200", "L40S")}
    cards |= {"NVIDIA H100 80GB HBM3": ["H100 SXM"], "NVIDIA A100-PCIE-40GB": ["A100 PCIe 40 GB"]}
    cards |= {"RTX4090": ["RTX 4090"], "a100 80gb": ["A100 SXM 80 GB", "A100 PCIe 80 GB"], "Tesla T4": ["T4"]}
    cards |= {"A100 SXM": ["A100 SXM 80 GB", "A100 SXM 40 GB"], "a100 sxm 40gb": ["A100 SXM 40 GB"]}
    cards |= {name: [] for name in ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", "NVIDIA RTX A4000", "NVIDIA L40", "H", "")}
    assert {name: [card.card for card in cards_named(name)] for name in cards} == cards


def test_a_card_without_a_speed_gets_an_estimate() -> None:
    (card,) = cards_named("NVIDIA A30")  # is in PEAK_FLOPS, but not in cards.yaml
    assert card.memory_gb is None and card.speed.startswith("estimated")
    shares = {name: cards_named(name)[0].tokens_per_second * 855e6 / peak for name, peak in PEAK_FLOPS.items()}
    lowest = 3e6 / 8 * 855e6 / 989.4e12  # published: 8 x H100 SXM, 3M tokens/s
    assert shares["A30"] == pytest.approx(lowest, rel=0.02)
    known = [shares[name] for name in ("H100", "H200", "A100", "RTX 4090")]
    assert lowest <= min(known) and all(share <= max(known) * 1.01 for share in shares.values()), shares
    # The speeds are those of bf16 and fp16.
    assert cost_of(work(bf16="false"), "A30", 1).minutes is None
    spent = minutes(cost_of(work(precision="fp16"), "T4", 1))
    assert 60 * spent["training steps"] == pytest.approx(TOKENS / 24_000)


def test_every_price_has_a_card_a_source_and_a_date() -> None:
    for price in PRICES:
        assert price.card in CARDS and price.source and price.date.year == 2026 and price.usd_per_hour > 0
        assert ("spot" in price.provider) == ("(estimate)" in price.provider)
    assert not [card for card in CARDS if (price := price_of(card)) and "spot" in price.provider]  # never the default


def test_the_expected_loss_is_near_llmc_s() -> None:
    assert expected_loss(124_439_808, 9.89e9) == pytest.approx(3.28)
    assert expected_loss(354_823_168, 31.46e9) == pytest.approx(2.9282, abs=0.04)  # saved log of llm.c's 350M


def test_the_learning_rate_of_a_budget_falls_with_the_width_and_rises_with_the_batch() -> None:
    scale = gpt2_scale(n_layer=12, n_embd=768, **ROWS)
    rates = {(12, 19): 6e-4, (24, 19): 4.2e-4, (6, 19): 8.5e-4, (12, 18): 4.2e-4, (12, 21): 1.2e-3, (48, 19): 3e-4}
    for (depth, log2), rate in rates.items():
        assert Choice(depth, scale, tokens_per_step=1 << log2, steps=100).learning_rate == rate, (depth, log2)


@pytest.mark.parametrize(("flops", "gpus"), [(1e16, 1), (1e18, 8), (8.46e18, 1), (1e20, 3)])
def test_a_choice_is_the_smallest_that_is_nearly_the_best(flops: float, gpus: int) -> None:
    choice = choose(flops, gpus)
    assert 0.98 * flops < choice.tokens * choice.scale.flops_per_token <= flops

    def loss(depth: int) -> float:
        scale = gpt2_scale(n_layer=depth, n_embd=64 * depth, **ROWS)
        return 482.01 / scale.parameters**0.3478 + 2085.43 / (flops / scale.flops_per_token) ** 0.3658

    losses = {depth: loss(depth) for depth in range(2, 40)}
    assert losses[choice.depth] == pytest.approx(min(losses.values()) + 0.015, abs=0.02)  # steps are rounded
    assert all(losses[depth] > losses[choice.depth] for depth in range(2, choice.depth))
    wanted = 2**19 * (choice.tokens / 9.89e9) ** 0.383
    assert wanted / 1.5 < choice.tokens_per_step < wanted * 1.5 and choice.tokens_per_step % (1024 * gpus) == 0
