"""Keep a copy of all that a training process prints, in the run directory."""

import datetime
import io
import os
import platform
from pathlib import Path

from gpt2_repro import ranks


EARLY_BYTES = 200_000  # that are kept in memory


class Console:
    """The text that this process prints.

    Until `open`, the text stays in memory, because a start that is refused writes nothing to the run directory.
    """

    def __init__(self) -> None:
        self._early = b""
        self._file: io.FileIO | None = None

    @property
    def descriptor(self) -> int | None:
        """The file descriptor of the file, None if it is not open."""
        if self._file is None:
            return None
        return self._file.fileno()

    def open(self, path: Path) -> None:
        """Append all text to a file: that which was printed before, and that which follows.

        All ranks share the file. Lines of other ranks than 0 begin with the number of the rank.
        """
        early = self._early
        self.close()
        try:
            self._file = io.FileIO(path, "a")
        except OSError:  # a full disk: training does not need the file
            return
        if ranks.is_main():
            now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
            header = f"=== {now}: started on {platform.node()}, {ranks.count()} processes, process id {os.getpid()}\n"
            self.write(header.encode())
        self.write(early)

    def write(self, text: bytes) -> None:
        """Append text to the file. Text that cannot be written is lost."""
        if self._file is None:
            self._early = (self._early + text)[-EARLY_BYTES:]
            return
        if not ranks.is_main():
            mark = f"[rank {ranks.index()}] ".encode()
            text = b"".join(mark + line for line in text.splitlines(keepends=True))
        try:
            self._file.write(text)
        except OSError:
            return

    def close(self) -> None:
        """Close the file, and forget the text in memory."""
        if self._file is not None:
            self._file.close()
        self._file = None
        self._early = b""


console = Console()
