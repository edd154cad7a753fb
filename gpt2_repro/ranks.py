"""Let rank 0 decide for all ranks, and gather small tensors from their CPUs.

The functions are collectives: call them on all ranks in the same order.
"""

import contextlib
import functools
import os
import pickle
import sys
import time
import zlib
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from gpt2_repro.errors import RunFailed, UserError


if TYPE_CHECKING:  # torch is imported where it is needed, which takes 2 s
    from torch import Tensor

DECISION_HOURS = 12.0  # longest time that the other ranks wait until rank 0 has restored a run
CONNECT_SECONDS = 300.0  # longest difference between the starts of the machines

T = TypeVar("T")


def is_main() -> bool:
    """Return whether this process is rank 0. No collective."""
    return index() == 0


def index() -> int:
    """Return the rank of this process. No collective."""
    return int(os.environ.get("RANK", "0"))


def count() -> int:
    """Return the number of ranks. No collective."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def on_this_machine() -> int:
    """Return the number of ranks on this machine. No collective."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def decide(function: Callable[[], T]) -> T:
    """Call `function` on rank 0, and return its result, or raise its error, on all ranks.

    This needs no process group. Call it once per function.
    """
    if count() == 1:
        return function()
    outcome: Any = None
    if is_main():
        try:
            outcome = function()
        except (UserError, RunFailed) as error:
            # The launcher ends the processes of its own machine only. The others would wait for rank 0. So would those of
            # one machine after the process group has started, because they handle the launcher's signal after a step.
            if on_this_machine() == count() and not _has_group():
                raise
            outcome = error
    store = _store()
    key = f"{function.__qualname__}-{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"
    if is_main():
        store.set(key, pickle.dumps(outcome))
    else:
        store.wait([key], timedelta(hours=DECISION_HOURS))
        outcome = pickle.loads(store.get(key))
    if isinstance(outcome, Exception):
        # The store ends with the launcher of rank 0, which ends after the first process of its machine.
        store.set(f"{key}-{index()}", "")
        keys = [f"{key}-{rank}" for rank in range(count())]
        with contextlib.suppress(RuntimeError):
            store.wait(keys, timedelta(seconds=CONNECT_SECONDS))
        raise outcome
    return outcome


def _has_group() -> bool:
    """Return whether the process group has started, without importing torch."""
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_initialized()


@functools.cache  # the launcher of rank 0 hosts it
def _store() -> Any:
    from torch.distributed import rendezvous

    # For a machine whose launcher has ended, torch tries twice. By default, each attempt takes 30 minutes.
    store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=CONNECT_SECONDS)))
    return store


def largest(number: int) -> int:
    """Return the maximum of `number` over all ranks."""
    import torch

    return int(gather(torch.tensor([number])).max())


def of_main(number: float) -> float:
    """Return the `number` of rank 0 on all ranks."""
    import torch

    return gather(torch.tensor([number], dtype=torch.float64))[0].item()


def sum_on_machine(number: int) -> int:
    """Return the sum of `number` over the ranks of this machine."""
    import torch

    numbers = gather(torch.tensor([number])).flatten()
    first = index() - int(os.environ.get("LOCAL_RANK", "0"))
    return int(numbers[first : first + on_this_machine()].sum())


def wait() -> None:
    """Wait until all ranks have called this function."""
    largest(0)


def gather(values: "Tensor") -> "Tensor":
    """Return the CPU tensors `values` (shape [n]) of all ranks, as shape [ranks, n]."""
    import torch
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_world_size() == 1:
        return values[None]
    group = dist.group.WORLD
    if dist.get_backend() != "gloo":
        group = _gloo_group()  # the GPUs do not wait for its collectives
    rows = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, values, group=group)
    return torch.stack(rows)


def check_equal(settings: Mapping[str, object]) -> None:
    """Raise UserError if a value of `settings` differs between the ranks."""
    import torch

    values = torch.tensor([zlib.crc32(repr(value).encode()) for value in settings.values()])
    equal = (gather(values) == values).all(dim=0).tolist()
    differing = [name for name, is_equal in zip(settings, equal, strict=True) if not is_equal]
    if differing:
        raise UserError(f"The machines of this run have different values of {', '.join(differing)}.")


def check_shared(file: Path) -> None:
    """Raise UserError if a file that rank 0 just wrote differs between the machines."""
    import torch

    wait()  # until rank 0 has written it
    for _ in range(60):  # a network file system shows new files late
        content = file.read_bytes() if file.is_file() else b""
        checksums = gather(torch.tensor([zlib.crc32(content)]))
        if len(checksums.unique()) == 1:
            return
        time.sleep(1)
    fix = "Pass an --output_dir that they share (docs/machines.md), or train on one machine."
    raise UserError(f"{file.parent} is not the same folder on all machines. {fix}")


@functools.cache
def _gloo_group() -> Any:
    import torch.distributed as dist

    return dist.new_group(backend="gloo")
