"""The results of gpu.py, which are on disk as soon as they are measured."""

import json
import os
import re
import statistics
import sys
import tarfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu_variants import AS_IT_IS
from benchmarks.processes import Finished, logged
from gpt2_repro.run_record import RunRecord


FILE = "results.jsonl"
PACKED = ("*.jsonl", "*.json", "*.log", "*.md")  # not an archive in the same folder
ARCHIVE_SECONDS = 15.0
SETTLED = 5  # steps at the start that are not measured
CLOSE = 0.05  # largest relative difference between the measured and the estimated memory


class Results:
    """Results and logs in a folder.

    A process that is killed leaves complete files: a result is one write, and other files are replaced.

    Args:
        folder: the folder of results.jsonl, gpu.md and the logs.
        archive: a .tar.gz with all of these files, which is replaced after each result and every ARCHIVE_SECONDS.
    """

    def __init__(self, folder: Path, archive: Path | None) -> None:
        self.folder = folder
        self.archive = archive
        self.entries: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        self._is_closed = threading.Event()
        folder.mkdir(parents=True, exist_ok=True)
        if archive is not None:
            archive.parent.mkdir(parents=True, exist_ok=True)
            threading.Thread(target=self._pack_again, daemon=True).start()

    def add(self, entry: dict[str, Any]) -> None:
        """Append a result to results.jsonl."""
        self.entries.append(entry)
        append_line(self.folder / FILE, entry)

    def write_tables(self, text: str) -> None:
        """Replace gpu.md and the archive."""
        replace_text(self.folder / "gpu.md", text)
        self.pack()

    def pack(self) -> None:
        """Replace the archive, if one is requested."""
        if self.archive is None:
            return
        with self._lock:
            new = self.archive.with_name(self.archive.name + ".new")
            with tarfile.open(new, "w:gz") as packed:
                for pattern in PACKED:
                    for path in sorted(self.folder.glob(pattern)):
                        packed.add(path, path.name)
            new.replace(self.archive)

    def close(self) -> None:
        """Pack for the last time."""
        self._is_closed.set()
        self.pack()

    def _pack_again(self) -> None:
        while not self._is_closed.wait(ARCHIVE_SECONDS):
            self.pack()


def append_line(path: Path, entry: dict[str, Any]) -> None:
    """Append an entry to a file of JSON lines with one write, and wait until it is on disk."""
    line = json.dumps(entry) + "\n"
    with path.open("ab", buffering=0) as file:
        file.write(line.encode())
        os.fsync(file.fileno())


def replace_text(path: Path, text: str) -> None:
    """Replace a file at once."""
    new = path.with_name(path.name + ".new")
    new.write_text(text, encoding="utf-8")
    new.replace(path)


def shown(values: Mapping[str, Any]) -> str:
    """Return measured values as text."""
    return ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in values.items())


def cause(error: BaseException) -> str:
    """Return the message of the last error that the output of a command names, or its end."""
    text = str(error)
    named = [line for line in re.findall(r"\w*[Ee]rror: .+", text) if "ChildFailedError" not in line]
    return f"{type(error).__name__}: {named[-1] if named else text[-300:]}"


def summary(speeds: list[float]) -> dict[str, Any]:
    """Return the median and the range of the speeds of the measured steps. Exits without enough steps."""
    if len(speeds) < 2:
        sys.exit(f"{len(speeds)} steps were measured")
    values = {"tokens_per_second": statistics.median(speeds), "lowest": min(speeds), "highest": max(speeds)}
    return {**{name: round(value) for name, value in values.items()}, "log_lines": len(speeds)}


def peak_of(done: Finished) -> dict[str, Any]:
    return {"peak_gb": round(done.peak_mib * 2**20 / 1e9, 1), "seconds": round(done.seconds, 1)}


def speed_of(run: Path, done: Finished, *, first: int = SETTLED, last: int | None = None) -> dict[str, Any]:
    """Return the speed of the steps after `first` and up to `last` in the log of a run."""
    events = [event for step, event in logged(run).items() if step > first and (last is None or step <= last)]
    timed = [event for event in events if "tokens_per_second" in event]
    speed = summary([event["tokens_per_second"] for event in timed])
    wait = statistics.median(event["data_wait"] for event in timed)
    return {**speed, "data_wait": round(wait, 4), **peak_of(done), "attention": RunRecord(run).environment().attention}


def start_of(run: Path, seconds: float) -> dict[str, Any]:
    """Return the time of a start until the end of its first step, and that of its phases."""
    phases = dict(RunRecord(run).environment().startup)
    return {"seconds": round(seconds, 1), "launcher": round(seconds - sum(phases.values()), 1), **phases}


def compared(measured_bytes: float, estimated_bytes: float) -> dict[str, Any]:
    """Return the measured and the estimated memory in GB, and whether they are close. Without a GPU, nothing is."""
    values: dict[str, Any] = {
        "nvidia_smi_gb": round(measured_bytes / 1e9, 1),
        "estimated_gb": round(estimated_bytes / 1e9, 1),
    }
    if measured_bytes:
        difference = estimated_bytes / measured_bytes - 1
        values["difference"] = f"{difference:+.1%}"
        values["within_5_percent"] = abs(difference) <= CLOSE
    return values


def kernel_results(path: Path) -> list[dict[str, Any]]:
    """Return the results of kernels.py, with three digits."""
    if not path.is_file():
        return []
    results: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        if "started" in entry:
            continue
        for key, value in entry.items():
            if isinstance(value, float):
                entry[key] = float(f"{value:.3g}")
        results.append(entry)
    return results


def tables(results: list[dict[str, Any]], machine: list[str], processes: int) -> str:
    """Return results as Markdown. `machine` describes it, and train.py had so many processes."""
    speeds = [result for result in results if "tokens_per_second" in result]
    ours = next((each["tokens_per_second"] for each in speeds if each["name"] == AS_IT_IS.name), None)
    lines = [*machine, f"`python {' '.join(sys.argv)}`", ""]
    lines.append("| part, name | tokens/s (min to max) | relative | peak GB | attention |")
    lines.append("| --- | --- | --- | --- | --- |")
    for each in speeds:
        on_one_card = each["part"] in ("programs", "nanogpt")
        relative = "-"
        if ours:
            cards = processes if on_one_card else 1
            relative = f"{each['tokens_per_second'] * cards / ours:.3f}"
        form = "| {part}, {name} | {tokens_per_second:,} ({lowest:,} to {highest:,}) "
        rest = f"| {relative} | {each['peak_gb'] or '-'} | {each.get('attention', '-')} |"
        lines.append(form.format(**each) + rest)
    llmc = [each for each in speeds if each["part"] == "programs"]
    if llmc and ours:
        fastest = max(llmc, key=lambda each: each["tokens_per_second"])
        relative = f"{ours / processes / fastest['tokens_per_second']:.3f}"
        lines += ["", f"train.py has {relative} of the speed of the fastest llm.c (`{fastest['name']}`)."]
    lines += ["", "| part, name | values |", "| --- | --- |"]
    for each in results:
        if each not in speeds:
            values = {key: value for key, value in each.items() if key not in ("part", "name")}
            text = " ".join(shown(values).replace("|", " ").split())
            lines.append(f"| {each['part']}, {each['name']} | {text} |")
    return "\n".join(lines) + "\n"
