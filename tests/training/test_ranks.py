"""Collectives between ranks: the largest number, and whether weights agree."""

import pytest
import torch

from gpt2_repro.errors import RunFailed
from gpt2_repro.training.ranks import Ranks
from gpt2_repro.training.replicas import require_same_weights


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


def test_the_largest_number_of_all_ranks_counts() -> None:
    assert Ranks().number == 1 and Ranks().largest(7) == 7
    assert Others(lambda said: said - 1, lambda said: said + 2).largest(7) == 9


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_flipped_bit_on_one_rank_is_found(dtype: torch.dtype) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Linear(32, 4)).to(dtype)
    seen: list[torch.Tensor] = []
    require_same_weights(model, Others(torch.clone, lambda values: seen.append(values) or values), step=1)
    model[1].weight.data.view(torch.int16)[2, 3] ^= 1  # the lowest one
    with pytest.raises(RunFailed, match="step 7 .* rank 2 .* 1.weight"):
        require_same_weights(model, Others(torch.clone, lambda _: seen[0]), step=7)
