"""Batches, steps and schedules agree with published numbers and formulas."""

import math

import pytest

from gpt2_repro.errors import UserError
from gpt2_repro.model.size import bytes_of_rank, checkpoint_bytes, flops_per_token, gpt2_parameters
from gpt2_repro.optim.schedule import learning_rate_factor
from gpt2_repro.planning.batch_plan import plan_batches
from gpt2_repro.recipe import TrainingSection, count_steps
from gpt2_repro.tokens import TokenCount


GPT2 = {"n_layer": 12, "n_embd": 768, "n_positions": 1024}


def llmc_learning_rate(step: int, warmup: int, total: int, final: float, kind: str) -> float:
    """Return the learning rate of a step by the formulas of llm.c, with a peak of 1.

    Source: get_lr in llm.c's train_gpt2.py, and get_learning_rate_wsd in llm.c's schedulers.h.
    """
    if step < warmup:
        return (step + 1) / warmup
    if kind == "cosine":
        ratio = (step - warmup) / (total - warmup)
        return final + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (1 - final)
    decay_from = int((1.0 - 0.2) * total)
    return (
        1 if step < decay_from else final + (1 - math.sqrt((step - decay_from) / (total - decay_from))) * (1 - final)
    )


@pytest.mark.parametrize("kind", ["cosine", "warmup_stable_decay"])
@pytest.mark.parametrize(("warmup", "total", "final"), [(700, 18_865, 0.0), (3, 20, 0.1), (0, 5, 0.0)])
def test_learning_rate_is_llmcs_at_every_step(warmup: int, total: int, final: float, kind: str) -> None:
    shape = {"warmup_steps": warmup, "max_steps": total, "final_factor": final, "kind": kind, "decay_fraction": 0.2}
    ours = [learning_rate_factor(step, **shape) for step in range(total)]
    theirs = [llmc_learning_rate(step, warmup, total, final, kind) for step in range(total)]
    assert ours == pytest.approx(theirs, rel=1e-12)


def test_learning_rate_behind_its_end_and_of_a_warm_up_alone() -> None:
    assert learning_rate_factor(30, warmup_steps=3, max_steps=20, final_factor=0.1) == pytest.approx(0.1)
    assert [learning_rate_factor(step, warmup_steps=2, max_steps=2) for step in range(2)] == [0.5, 1]


def test_sizes_of_gpt2_124m() -> None:
    adamw = {"bf16": True, "averaged": False}
    assert [gpt2_parameters(**GPT2, vocab_size=ids) for ids in (50_257, 50_304)] == [124_439_808, 124_475_904]
    # nanoGPT's count: without position embeddings.
    flops = flops_per_token(parameters=124_439_808 - 1024 * 768, n_layer=12, n_embd=768, sequence_length=1024)
    assert flops == pytest.approx(855.2e6, rel=1e-3)
    assert checkpoint_bytes(124_475_904, **adamw) == pytest.approx(2.07e9, rel=0.05)
    sharded = [bytes_of_rank(124_475_904, **adamw, rank=rank, shards=4) for rank in range(4)]
    assert sum(sharded) == checkpoint_bytes(124_475_904, **adamw) and sharded[0] > sharded[1] == sharded[3]
    assert [bytes_of_rank(100, **adamw, rank=rank, shards=0) for rank in range(2)] == [1200, 0]
    averaged = {"bf16": True, "averaged": True}
    assert [bytes_of_rank(100, **averaged, rank=rank, shards=2) for rank in range(2)] == [1600, 800]
    assert [bytes_of_rank(100, **averaged, rank=rank, shards=0) for rank in range(2)] == [2000, 0]
    assert checkpoint_bytes(100, **averaged) - checkpoint_bytes(100, **adamw) == 800  # in the state, and as a model


def test_what_does_not_divide_names_choices_that_do() -> None:
    asked = {"tokens_per_step": 524_288, "sequence_length": 1024, "num_processes": 8, "max_steps": 5}
    with pytest.raises(UserError) as error:
        plan_batches(**asked, micro_batch_size=48)
    words = str(error.value).split()
    micro = int(words[words.index("--per_device_train_batch_size") + 1])
    tokens = int(words[words.index("--tokens_per_step") + 1])
    assert plan_batches(**asked, micro_batch_size=micro).gradient_accumulation_steps >= 1
    assert plan_batches(**(asked | {"tokens_per_step": tokens}), micro_batch_size=48).gradient_accumulation_steps >= 1


def test_max_steps_replaces_total_tokens() -> None:
    for tokens, asked, steps in ((640, 3, 3), (700, 0, 10)):
        section = TrainingSection(tokens_per_step=64, total_tokens=TokenCount(tokens), max_steps=asked)
        assert count_steps(section) == steps
    for wrong in ({"total_tokens": 63}, {"max_steps": -1}, {"tokens_per_step": -1}):
        with pytest.raises(UserError, match=f"{next(iter(wrong))} "):
            count_steps(TrainingSection(**{"tokens_per_step": 64} | wrong))
