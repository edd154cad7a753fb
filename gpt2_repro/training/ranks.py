"""Gather small tensors from the CPUs of all ranks.

The functions are collectives: call them on all ranks in the same order.
"""

import functools
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gpt2_repro.errors import UserError


VISIBLE_WITHIN = 60  # seconds until a file that one machine has written must be visible on all machines


def largest(number: int) -> int:
    """Return the maximum of `number` over all ranks."""
    return int(gather(torch.tensor([number])).max())


def gather(values: Tensor) -> Tensor:
    """Return the CPU tensors `values` (shape [n]) of all ranks, as shape [ranks, n]."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return values[None]
    rows = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    # The GPUs do not wait for a collective of gloo.
    dist.all_gather(rows, values, group=dist.group.WORLD if dist.get_backend() == "gloo" else _gloo_group())
    return torch.stack(rows)


def check_equal(settings: Mapping[str, object]) -> None:
    """Raise UserError if a value of `settings` differs between the ranks."""
    values = torch.tensor([zlib.crc32(repr(value).encode()) for value in settings.values()])
    equal = (gather(values) == values).all(dim=0).tolist()
    if differing := [name for name, is_equal in zip(settings, equal, strict=True) if not is_equal]:
        raise UserError(f"The machines of this run have different values of {', '.join(differing)}.")


def check_shared(file: Path) -> None:
    """Raise UserError if a file that rank 0 just wrote differs between the machines."""
    for _ in range(VISIBLE_WITHIN):
        content = file.read_bytes() if file.is_file() else b""
        if len(set(gather(torch.tensor([zlib.crc32(content)])).flatten().tolist())) == 1:
            return
        time.sleep(1)  # a network file system shows new files late
    raise UserError(f"{file.parent} is not the same folder on all machines. Pass an --output_dir that they share.")


@functools.cache
def _gloo_group() -> Any:
    return dist.new_group(backend="gloo")
