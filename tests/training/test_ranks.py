"""Collectives between ranks: the largest number, and whether weights agree."""

import re

import pytest
import torch

from gpt2_repro.errors import RunFailed
from gpt2_repro.training.ranks import Ranks
from gpt2_repro.training.replicas import fingerprints, require_same_weights


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
