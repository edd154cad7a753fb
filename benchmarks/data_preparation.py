"""Whole data preparation, this project's beside three others, from the same files to data ready for training.

    python benchmarks/data_preparation.py --output preparation.json
    python benchmarks/data_preparation.py --copies 10 --num_proc 8 --only nanogpt llmc ours

Each contender is one command in a fresh process with caches of its own, from its start to its end, imports included,
in rounds that go forward and back through the list; the files are in the page cache. Two sizes are prepared, the
first files and all: the whole-command rate is that of all files, the marginal rate that of the files which only the
larger size has, so without what a start costs. Peak memory is the sum of the resident sets of the process and all
below it, every 50 ms; a page that several processes map counts in each, and mapped files count. Beside it the same
without pages of files and shared memory. Peak disk is what lies in the contender's folder, caches included, every
250 ms. Only this project hashes its data, waits until it is on the disk and, up to 5M tokens, counts the reference
losses of its manifest; that is in its time.

The text: novels, cut at paragraph ends into documents of about 4.5 KB, the size of web documents, and web pages of US
authorities, whole; shuffled. --copies repeats it: an encoder that remembers words has then seen all of them before,
so copies favour it.
"""

import argparse
import dataclasses
import datetime
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil  # accelerate brings it


sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.preparation_contenders import Job, count
from benchmarks.preparation_corpus import DOCUMENT_BYTES, read_documents, write_corpus
from benchmarks.preparation_table import CONTENDERS, Measured, agreed_tokens, remarks, table
from benchmarks.processes import ROOT, kill_all
from benchmarks.side_by_side import cpu_name


DATA = Path(os.environ.get("GPT2_REPRO_TEST_DATA", ROOT.parent / "shared" / "data"))
MEMORY_EVERY, DISK_EVERY = 0.05, 0.25  # s
KINDS = {"parquet": "parquet", "jsonl": "json"}  # ending: what `datasets` calls it


def main() -> None:
    """Write the corpus, measure, compare the counts of tokens, print tables in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num_proc", type=int, default=2, help="worker processes of each contender (2)")
    parser.add_argument("--copies", type=int, default=1, help="of the text, one after another (1)")
    parser.add_argument("--files", type=int, default=8, help="that the text is spread over (8)")
    parser.add_argument("--small", type=int, help="files of the smaller size (a quarter of --files)")
    parser.add_argument("--documents", type=int, help="only so many documents of the text")
    parser.add_argument("--formats", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument(
        "--compression", choices=["zstd", "snappy"], default="zstd", help="of the parquet files (zstd)"
    )
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=list(CONTENDERS), help="these contenders")
    parser.add_argument("--rounds", type=int, default=2, help="fresh processes of each contender and size (2)")
    parser.add_argument("--validation_tokens", type=int, default=100_000, help="that this project holds out (100,000)")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds for one command (1,800)")
    parser.add_argument("--data", type=Path, default=DATA, help="folder with prose/ and gpt2/ (%(default)s)")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="takes corpus and results")
    parser.add_argument("--output", type=Path, help="write all numbers to this JSON file")
    args = parser.parse_args()
    small = args.small or max(1, args.files // 4)
    if not (args.data / "prose").is_dir() or not (args.data / "gpt2").is_dir():
        parser.error(
            f"there is no prose/ and gpt2/ in {args.data}: name the folder with --data or GPT2_REPRO_TEST_DATA"
        )
    if args.copies < 1 or not 0 < small < args.files:
        parser.error("this needs --copies of 1 or more, and fewer --small files than --files")
    if {"nanogpt", "llmc"} & set(args.only) and _version("tiktoken") == "absent":
        parser.error("nanogpt and llmc need tiktoken: pip install -r requirements-dev.txt, or --only blog ours")

    results: dict[str, dict[str, dict[int, list[Measured]]]] = {}
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="data_preparation-") as root:
        corpus, work = Path(root, "corpus"), Path(root, "work")
        documents = read_documents(args.data / "prose")[: args.documents]
        sizes = write_corpus(corpus, documents, args.copies, args.files, args.compression)
        for turn in range(args.rounds):
            for ending in args.formats:
                for name in args.only if turn % 2 == 0 else reversed(args.only):
                    for files in (small, args.files):
                        chosen = [str(path) for path in sorted(corpus.glob(f"*.{ending}"))[:files]]
                        job = Job(KINDS[ending], chosen, str(args.data / "gpt2"), str(work / "data"), args.num_proc)
                        held_out = min(args.validation_tokens, sum(sizes[:files]) // 40)  # of tiny texts, a tenth
                        measured = run(name, job, work, validation_tokens=held_out, timeout=args.timeout)
                        print(f"round {turn + 1} {ending} {name} {files} files: {measured}", file=sys.stderr)
                        of_kind = results.setdefault(ending, {}).setdefault(name, {})
                        of_kind.setdefault(files, []).append(measured)
                        if args.output:
                            args.output.write_text(json.dumps(as_json(args, sizes, results), indent=1) + "\n")
    text = {files: sum(sizes[:files]) for files in (small, args.files)}
    tokens = agreed_tokens(results)
    print("\n".join(heading(args, text, tokens)))
    for ending, of_kind in results.items():
        print(f"\n{ending}:\n\n{table(of_kind, text, tokens)}")
        print("\n".join(remarks(of_kind, args.files, tokens)))


def run(name: str, job: Job, work: Path, *, validation_tokens: int, timeout: float) -> Measured:
    """One contender from an empty folder; what it left is counted and deleted. Exits where it fails."""
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    for path in job.files:
        Path(path).read_bytes()  # into the page cache
    os.sync()  # what others have written is not written during this one's time
    if name == "ours":
        words = ["prepare_data.py", "--data_files", *job.files, "--tokenizer", job.tokenizer]
        words += ["--dataset_dir", job.folder, "--num_proc", str(job.processes)]
        words += ["--validation_tokens", str(validation_tokens)]
    else:
        words = ["-m", "benchmarks.preparation_contenders", name, json.dumps(dataclasses.asdict(job))]
    environment = os.environ | {"HF_HOME": str(work / "cache"), "HF_HUB_OFFLINE": "1"}
    log, found = work / "log", {"resident": 0, "anonymous": 0, "disk": 0}
    with log.open("w") as out:
        began = time.perf_counter()
        command = [sys.executable, *words]
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT)
        looked = 0.0
        try:
            while process.poll() is None:
                if time.perf_counter() - began > timeout:
                    sys.exit(f"{name} is not done in {timeout} s")
                for key, value in zip(("resident", "anonymous"), memory(process.pid), strict=True):
                    found[key] = max(found[key], value)
                if time.perf_counter() - looked > DISK_EVERY:
                    found["disk"], looked = max(found["disk"], disk(work)), time.perf_counter()
                time.sleep(MEMORY_EVERY)
            seconds = time.perf_counter() - began
        finally:
            kill_all(process)
    if process.returncode:
        sys.exit(f"{name} failed with exit code {process.returncode}:\n{log.read_text()[-3000:]}")
    found["disk"] = max(found["disk"], disk(work))
    counts = count(name, Path(job.folder))
    if name != "ours":
        counts |= json.loads(log.read_text().splitlines()[-1])
    data = disk(Path(job.folder)) - disk(Path(job.folder, "tokenizer"))
    measured = Measured(seconds=seconds, data=data, counts=counts, **found)
    shutil.rmtree(work)
    return measured


def memory(pid: int) -> tuple[int, int]:
    """Bytes resident in a process and all below it, and of these the anonymous ones."""
    resident = anonymous = 0
    try:
        tree = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0, 0
    for process in tree:
        try:
            info = process.memory_info()
        except psutil.Error:
            continue
        resident += info.rss
        anonymous += info.rss - getattr(info, "shared", 0)
    return resident, anonymous


def disk(folder: Path) -> int:
    """Bytes that the files below a folder take on the disk, in whole blocks."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.lstat().st_blocks * 512
        except FileNotFoundError:
            continue
    return total


def heading(args: argparse.Namespace, text: dict[int, int], tokens: dict[int, int]) -> list[str]:
    """When, where, with what and on what."""
    names = ("datasets", "transformers", "tokenizers", "tiktoken", "pyarrow", "numpy", "gigatoken", "fastokens")
    small, large = text
    return [
        f"{datetime.date.today()}, {cpu_name()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
        + ", ".join(f"{name} {version}" for name in names if (version := _version(name)) != "absent"),
        f"`python {' '.join(sys.argv)}`",
        f"{text[large] / 1e6:.1f} MB of text in {large} files ({text[small] / 1e6:.1f} MB in the first {small}), "
        f"{tokens.get(large, 0):,} tokens without separators; {args.copies} "
        + ("copy" if args.copies == 1 else "copies (which favour encoders that remember words)")
        + f", novels cut into documents of about {DOCUMENT_BYTES / 1000} KB; {args.num_proc} worker processes, "
        f"{args.rounds} rounds; contenders that keep all text agree on its tokens",
    ]


def as_json(args: argparse.Namespace, sizes: list[int], results: dict[str, Any]) -> dict[str, Any]:
    """All numbers, and what they were measured with."""
    options = {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}
    measured = {
        ending: {
            name: {files: [dataclasses.asdict(one) for one in rounds] for files, rounds in of_contender.items()}
            for name, of_contender in of_kind.items()
        }
        for ending, of_kind in results.items()
    }
    return {"date": f"{datetime.date.today()}", "options": options, "bytes_of_files": sizes, "results": measured}


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "absent"


if __name__ == "__main__":
    main()
