"""The arithmetic against published numbers and formulas written down a second time."""

import math

import pytest

from gpt2_repro.compute import (
    checkpoint_bytes,
    flops_per_token,
    gpt2_parameters,
    learning_rate_factor,
    nearest_micro_batch,
    plan_batches,
)
from gpt2_repro.errors import UserError


GPT2 = {"n_layer": 12, "n_embd": 768, "n_positions": 1024}


def llmc_learning_rate(step: int, peak: float, warmup: int, total: int, final: float) -> float:
    """llm.c's get_lr (train_gpt2.py), read from its source and written down here again."""
    low = peak * final
    if step < warmup:
        return peak * (step + 1) / warmup
    ratio = (step - warmup) / (total - warmup)
    return low + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (peak - low)


@pytest.mark.parametrize(("warmup", "total", "final"), [(700, 18_865, 0.0), (3, 20, 0.1), (0, 5, 0.0), (5, 5, 0.0)])
def test_learning_rate_is_llmcs_at_every_step(warmup: int, total: int, final: float) -> None:
    for step in range(total):
        ours = 6e-4 * learning_rate_factor(step, warmup_steps=warmup, max_steps=total, final_factor=final)
        assert ours == pytest.approx(llmc_learning_rate(step, 6e-4, warmup, total, final), rel=1e-12), step


def llmc_wsd(step: int, peak: float, warmup: int, total: int, final: float) -> float:
    """llm.c's get_learning_rate_wsd (llmc/schedulers.h), written down here again; it falls over the last fifth."""
    low, decay_from = peak * final, int((1.0 - 0.2) * total)
    if step < warmup:
        return peak * (step + 1) / warmup
    if step < decay_from:
        return peak
    ratio = (step - decay_from) / (total - decay_from)
    return low + (1.0 - math.sqrt(ratio)) * (peak - low)


@pytest.mark.parametrize(("warmup", "total", "final"), [(700, 18_865, 0.0), (3, 20, 0.1), (0, 5, 0.0)])
def test_warmup_stable_decay_is_llmcs_at_every_step(warmup: int, total: int, final: float) -> None:
    kind = {"kind": "warmup_stable_decay", "decay_fraction": 0.2}
    for step in range(total):
        ours = 6e-4 * learning_rate_factor(step, warmup_steps=warmup, max_steps=total, final_factor=final, **kind)
        assert ours == pytest.approx(llmc_wsd(step, 6e-4, warmup, total, final), rel=1e-12), step


def test_a_constant_rate_is_constant_behind_its_warm_up() -> None:
    rates = [learning_rate_factor(step, warmup_steps=2, max_steps=5, kind="constant") for step in range(7)]
    assert rates == [0.5, 1, 1, 1, 1, 1, 1]


def test_learning_rate_stays_at_its_end() -> None:
    assert learning_rate_factor(30, warmup_steps=3, max_steps=20, final_factor=0.1) == pytest.approx(0.1)


@pytest.mark.parametrize(("vocabulary", "parameters"), [(50_257, 124_439_808), (50_304, 124_475_904)])
def test_parameters_of_gpt2(vocabulary: int, parameters: int) -> None:
    assert gpt2_parameters(**GPT2, vocab_size=vocabulary) == parameters


def test_flops_per_token_are_nanogpts() -> None:
    multiplied = 124_439_808 - 1024 * 768
    assert flops_per_token(parameters=multiplied, n_layer=12, n_embd=768, sequence_length=1024) == pytest.approx(
        855.2e6, rel=1e-3
    )


def test_checkpoint_size_of_gpt2() -> None:
    assert checkpoint_bytes(124_475_904, bf16=True) == pytest.approx(2.07e9, rel=0.05)


def test_micro_batches_and_processes_share_a_step() -> None:
    for processes, micro, accumulation in [(8, 64, 1), (4, 64, 2), (1, 64, 8), (2, 16, 16), (3, 1, None)]:
        words = {"tokens_per_step": 524_288, "sequence_length": 1024, "total_tokens": 9_890_693_120}
        if accumulation is None:
            with pytest.raises(UserError, match="do not divide"):
                plan_batches(**words, micro_batch_size=micro, num_processes=processes)
        else:
            plan = plan_batches(**words, micro_batch_size=micro, num_processes=processes)
            assert plan.gradient_accumulation_steps == accumulation
            assert plan.rows_per_step == 512 and plan.max_steps == 18_865


def test_what_does_not_divide_names_choices_that_do() -> None:
    asked = {"tokens_per_step": 524_288, "sequence_length": 1024, "num_processes": 8, "max_steps": 5}
    with pytest.raises(UserError) as error:
        plan_batches(**asked, micro_batch_size=48)
    words = str(error.value).split()
    micro = int(words[words.index("--per_device_train_batch_size") + 1])
    tokens = int(words[words.index("--tokens_per_step") + 1])
    assert plan_batches(**asked, micro_batch_size=micro).gradient_accumulation_steps >= 1
    assert plan_batches(**(asked | {"tokens_per_step": tokens}), micro_batch_size=48).gradient_accumulation_steps >= 1


@pytest.mark.parametrize(("wanted", "nearest"), [(48, 32), (64, 64), (100, 64), (1, 1)])
def test_nearest_micro_batch(wanted: int, nearest: int) -> None:
    assert nearest_micro_batch(524_288, 1024, wanted, 8) == nearest


def test_max_steps_replaces_total_tokens() -> None:
    words = {"tokens_per_step": 64, "sequence_length": 32, "micro_batch_size": 2, "num_processes": 1}
    assert plan_batches(**words, total_tokens=640, max_steps=3).max_steps == 3
    assert plan_batches(**words, total_tokens=700).max_steps == 10
    with pytest.raises(UserError, match="less than one step"):
        plan_batches(**words, total_tokens=63)


def test_an_extended_schedule_goes_on_from_where_it_is() -> None:
    """RS13: no jump where the stretches join, the peak once more in each, the end at the last step."""
    shape = {"warmup_steps": 10, "max_steps": 100, "final_factor": 0.1}
    plain = [learning_rate_factor(step, **shape) for step in range(101)]
    for joint in (60, 100):
        extended = [learning_rate_factor(step, **shape, extensions=[[joint, 300]]) for step in range(301)]
        assert extended[:joint] == plain[:joint]
        assert extended[joint + 9] == pytest.approx(1.0) and extended[300] == pytest.approx(0.1)
        assert max(abs(b - a) for a, b in zip(extended, extended[1:], strict=False)) <= 0.1 + 1e-9  # a warm-up's step
        twice = [learning_rate_factor(step, **shape, extensions=[[joint, 300], [250, 400]]) for step in range(401)]
        assert twice[:250] == extended[:250] and twice[400] == pytest.approx(0.1)
        assert max(abs(b - a) for a, b in zip(twice, twice[1:], strict=False)) <= 0.1 + 1e-9
    short = [learning_rate_factor(step, **shape, extensions=[[100, 110]]) for step in range(100, 110)]
    assert max(short) == pytest.approx(1.0) and short[-1] < 0.5  # half of a short stretch is its warm-up
