"""How fast a run is between two lines of its log, without the time in which it does something else."""

import contextlib
import time
from collections.abc import Iterator


class Meter:
    """Measures from one line of the log to the next.

    Args:
        flops_per_token: of training.
        peak_flops: of all devices together in FLOP/s, None where it is not known.
    """

    def __init__(self, *, flops_per_token: int, peak_flops: float | None) -> None:
        self.flops_per_token, self.peak_flops = flops_per_token, peak_flops
        self._since: tuple[int, float] | None = None
        self.waited = self.paused = 0.0  # seconds in all
        self._waited_before = self._paused_before = 0.0
        self._step_tokens = self._targets = self._positions = 0

    def start(self, tokens: int) -> None:
        """Begin, at the first step of this process. `tokens`: those trained before."""
        if self._since is None:
            self._restart(tokens)

    def pause(self) -> contextlib.AbstractContextManager[None]:
        """Validation and saving: no time of training."""
        return self._timed("paused")

    def wait(self) -> contextlib.AbstractContextManager[None]:
        """Waiting for rows: time of training, and a share to be shown."""
        return self._timed("waited")

    @contextlib.contextmanager
    def _timed(self, total: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            setattr(self, total, getattr(self, total) + time.perf_counter() - began)

    def count(self, targets: int, positions: int) -> None:
        """Add a step whose rows are padded: its targets, and the positions that are computed for them."""
        self._step_tokens = targets
        self._targets += targets
        self._positions += positions

    def read(self, tokens: int) -> dict[str, float]:
        """Tokens per second, the share of waiting and MFU since the last reading; `tokens`: trained in all.

        Of padded rows also the targets of the last step, and the share of padding in all positions.
        """
        if self._since is None:
            return {}
        before, began = self._since
        seconds = time.perf_counter() - began - (self.paused - self._paused_before)
        speed = (tokens - before) / seconds
        line = {
            "tokens_per_second": round(speed, 1),
            "data_wait": round((self.waited - self._waited_before) / seconds, 4),
        }
        if self.peak_flops:
            line["mfu"] = round(speed * self.flops_per_token / self.peak_flops, 4)
        if self._positions:
            line |= {"step_tokens": self._step_tokens, "padding": round(1 - self._targets / self._positions, 4)}
        self._restart(tokens)
        return line

    def _restart(self, tokens: int) -> None:
        self._since = tokens, time.perf_counter()
        self._waited_before, self._paused_before = self.waited, self.paused
        self._targets = self._positions = 0
