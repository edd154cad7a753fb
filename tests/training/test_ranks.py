"""What ranks tell each other: stops, weights, which of them is slow."""

import re
import time
from types import SimpleNamespace

import pytest
import torch

from gpt2_repro.errors import RunFailed
from gpt2_repro.training import stragglers
from gpt2_repro.training.meter import Meter
from gpt2_repro.training.ranks import Ranks
from gpt2_repro.training.replicas import fingerprints, require_same_weights
from gpt2_repro.training.stragglers import Stragglers, slowest


METER = Meter(flops_per_token=1, peak_flops=None)


class Others(Ranks):
    """Ranks of which this process is the first and the others are given: as rows from what the first one says."""

    def __init__(self, *others) -> None:
        super().__init__()
        self.others = others

    @property
    def number(self) -> int:
        return 1 + len(self.others)

    def table(self, values: torch.Tensor) -> torch.Tensor:
        return torch.stack([values, *(other(values) for other in self.others)])


def test_one_process_is_its_own_largest() -> None:
    ranks = Ranks()
    assert ranks.number == 1 and ranks.largest(7) == 7
    assert Others(lambda said: said - 1, lambda said: said + 2).largest(7) == 9


@pytest.fixture(params=[torch.float32, torch.bfloat16])
def model(request) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Linear(32, 4)).to(request.param)


def test_equal_weights_have_equal_fingerprints_and_a_flipped_bit_another(model: torch.nn.Module) -> None:
    before = fingerprints(model)
    require_same_weights(model, Others(torch.clone, torch.clone), step=1)
    bits = model[1].weight.data.view(torch.int16)
    bits[2, 3] ^= 1  # the lowest one
    after = fingerprints(model)
    assert (before != after).tolist() == [False, False, True, False]
    with pytest.raises(
        RunFailed, match=re.escape("at step 7 the weights of rank 2 are not those of rank 0, in 1.weight")
    ):
        require_same_weights(model, Others(torch.clone, lambda _: before), step=7)


def test_the_slowest_rank_is_found_by_what_it_does_alone() -> None:
    even = (10.0, 1.0, 100.0)
    assert slowest([even]) is None and slowest([even, (11.9, 5.0, 100.0)]) is None
    assert slowest([even, even, (15.0, 1.0, 100.0), even]) == (2, "passes", 1.5)
    rank, what, factor = slowest([even, (10.0, 51.0, 100.0)])
    assert (rank, what) == (1, "rows") and factor == pytest.approx(2)


def test_only_what_lasts_is_told_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    slow = [True]
    told: list[tuple[int, dict]] = []
    other = lambda mine: mine * torch.tensor([2.0 if slow[0] else 1.0, 1.0, 1.0])  # noqa: E731
    compared = Stragglers(Others(other), METER, lambda *said: told.append(said))
    compared.on_train_begin(None, None, None)
    step = 0

    def window() -> None:
        nonlocal step
        for _ in range(stragglers.WINDOW):
            step += 1
            for _ in range(2):  # passes, of which the first counts
                with compared.time_pass(torch.device("cpu")):
                    now[0] += 0.01
            state = SimpleNamespace(global_step=step, is_world_process_zero=True)
            compared.on_step_end(None, state, None)

    window(), window()
    assert not told
    window(), window()
    ((at, event),) = told
    assert at == 300 and "rank 1, for 300 steps now: its forward passes take 2.0 times as long" in event["straggler"]
    slow[0] = False
    window()
    slow[0] = True
    window(), window()
    assert len(told) == 1
    window()
    assert [at for at, _ in told] == [300, 800]


def test_one_process_times_nothing() -> None:
    alone = Stragglers(Ranks(), METER, lambda *said: pytest.fail("told"))
    with alone.time_pass(torch.device("cpu")):
        pass
    assert not alone._passes
