"""Compare the data preparation of this project with three other methods.

    python benchmarks/data_preparation.py --output preparation.json
    python benchmarks/data_preparation.py --copies 10 --num_proc 8 --only nanogpt llmc ours

The contenders are this project and the methods of nanoGPT, llm.c and suzyahyah's blog post. Each contender reads the
same files and writes data that is ready for training. Each contender is one command in a fresh process with separate
caches. The measured time is that of the complete command, imports included. The contenders run in the given order in
odd rounds and in reverse order in even rounds. The input files are in the page cache.

Each contender prepares a small data set (only the first files) and a large one (all files). MB/s is the speed of the
complete command with all files. The marginal MB/s excludes the start-up time: it divides the additional text of the
large data set by the additional time.

Peak memory is the sum of the resident sets of the process and its descendants, sampled every 50 ms. A page that
several processes map counts once for each process. Pages of mapped files are included. In the column for peak memory,
the number in parentheses excludes pages of files and shared memory. Peak disk is the size of the contender's folder,
caches included, sampled every 250 ms.

Only this project hashes its data and waits until the data is on the disk. For at most 5M training tokens, this project
also computes unigram and bigram losses for its manifest. All of this is included in the time of this project.
--validation_tokens applies to this project only.

The text consists of novels and web pages of US authorities, in random order. The novels are cut at paragraph ends into
documents of about 4.5 KB, the size of web documents. The web pages are complete. --copies repeats the text. Repeated
text favors encoders that cache words, because these encoders have already seen every word.
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
KINDS = {"parquet": "parquet", "jsonl": "json"}  # file ending: name of the format in `datasets`


def main() -> None:
    """Write the corpus, measure the contenders, and print Markdown tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num_proc", type=int, default=2, help="Worker processes of each contender. (default: 2)")
    parser.add_argument("--copies", type=int, default=1, help="Number of times to repeat the text. (default: 1)")
    parser.add_argument("--files", type=int, default=8, help="Number of files that contain the text. (default: 8)")
    parser.add_argument("--small", type=int, help="Number of files in the small data set. (default: --files / 4)")
    parser.add_argument("--documents", type=int, help="Use only the first N documents of the text.")
    parser.add_argument("--formats", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument(
        "--compression", choices=["zstd", "snappy"], default="zstd", help="Codec of the parquet files. (default: zstd)"
    )
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=list(CONTENDERS), help="Contenders to run.")
    parser.add_argument("--rounds", type=int, default=2, help="Repetitions per contender and size. (default: 2)")
    parser.add_argument("--validation_tokens", type=int, default=100_000, help="Validation tokens. (default: 100,000)")
    parser.add_argument("--timeout", type=float, default=1800, help="Seconds allowed per command. (default: 1,800)")
    parser.add_argument("--data", type=Path, default=DATA, help="Folder with prose/ and gpt2/. (default: %(default)s)")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="Folder for temporary files.")
    parser.add_argument("--output", type=Path, help="JSON file for all measurements.")
    args = parser.parse_args()
    small = args.small or max(1, args.files // 4)
    if not (args.data / "prose").is_dir() or not (args.data / "gpt2").is_dir():
        parser.error(f"The folder {args.data} must contain prose/ and gpt2/. Pass --data or set GPT2_REPRO_TEST_DATA.")
    if args.copies < 1 or not 0 < small < args.files:
        parser.error("Set --copies to at least 1, and --small to at least 1 and less than --files.")
    if {"nanogpt", "llmc"} & set(args.only) and _version("tiktoken") == "absent":
        parser.error("tiktoken is missing. Run pip install -r requirements-dev.txt or pass --only blog ours.")

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
                        held_out = min(args.validation_tokens, sum(sizes[:files]) // 40)  # at most about a tenth
                        measured = run(name, job, work, validation_tokens=held_out, timeout=args.timeout)
                        print(f"round {turn + 1} {ending} {name} {files} files: {measured}", file=sys.stderr)
                        of_kind = results.setdefault(ending, {}).setdefault(name, {})
                        of_kind.setdefault(files, []).append(measured)
                        if args.output:
                            args.output.write_text(
                                json.dumps(as_json(args, sizes, results), indent=1) + "\n", encoding="utf-8"
                            )
    text = {files: sum(sizes[:files]) for files in (small, args.files)}
    tokens = agreed_tokens(results)
    print("\n".join(heading(args, text, tokens)))
    for ending, of_kind in results.items():
        print(f"\n{ending}:\n\n{table(of_kind, text, tokens)}")
        print("\n".join(remarks(of_kind, args.files, tokens)))


def run(name: str, job: Job, work: Path, *, validation_tokens: int, timeout: float) -> Measured:
    """Run one contender in an empty folder and return its measurements.

    Exits with an error if the command fails or takes longer than `timeout` seconds.
    """
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    for path in job.files:
        Path(path).read_bytes()  # load it into the page cache
    os.sync()  # write earlier data to the disk now, not during the measurement
    if name == "ours":
        words = ["prepare_data.py", "--data_files", *job.files, "--tokenizer", job.tokenizer]
        words += ["--dataset_dir", job.folder, "--num_proc", str(job.processes)]
        words += ["--validation_tokens", str(validation_tokens)]
    else:
        words = ["-m", "benchmarks.preparation_contenders", name, json.dumps(dataclasses.asdict(job))]
    environment = os.environ | {"HF_HOME": str(work / "cache"), "HF_HUB_OFFLINE": "1"}
    log, found = work / "log", {"resident": 0, "anonymous": 0, "disk": 0}
    with log.open("w", encoding="utf-8") as out:
        began = time.perf_counter()
        command = [sys.executable, *words]
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT)
        looked = 0.0
        try:
            while process.poll() is None:
                if time.perf_counter() - began > timeout:
                    sys.exit(f"{name} did not finish within {timeout} s. Pass a larger --timeout.")
                for key, value in zip(("resident", "anonymous"), memory(process.pid), strict=True):
                    found[key] = max(found[key], value)
                if time.perf_counter() - looked > DISK_EVERY:
                    found["disk"], looked = max(found["disk"], disk(work)), time.perf_counter()
                time.sleep(MEMORY_EVERY)
            seconds = time.perf_counter() - began
        finally:
            kill_all(process)
    if process.returncode:
        sys.exit(f"{name} failed with exit code {process.returncode}:\n{log.read_text(encoding='utf-8')[-3000:]}")
    found["disk"] = max(found["disk"], disk(work))
    counts = count(name, Path(job.folder))
    if name != "ours":
        counts |= json.loads(log.read_text(encoding="utf-8").splitlines()[-1])
    data = disk(Path(job.folder)) - disk(Path(job.folder, "tokenizer"))
    measured = Measured(seconds=seconds, data=data, counts=counts, **found)
    shutil.rmtree(work)
    return measured


def memory(pid: int) -> tuple[int, int]:
    """Return the resident and the anonymous bytes of a process and its descendants."""
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
    """Return the disk space in bytes that the files in a folder tree use."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.lstat().st_blocks * 512
        except FileNotFoundError:
            continue
    return total


def heading(args: argparse.Namespace, text: dict[int, int], tokens: dict[int, int]) -> list[str]:
    """Return lines that describe the date, machine, versions, command and text."""
    names = ("datasets", "transformers", "tokenizers", "tiktoken", "pyarrow", "numpy", "gigatoken", "fastokens")
    small, large = text
    return [
        f"{datetime.date.today()}, {cpu_name()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
        + ", ".join(f"{name} {version}" for name in names if (version := _version(name)) != "absent"),
        f"`python {' '.join(sys.argv)}`",
        f"{text[large] / 1e6:.1f} MB of text in {large} files ({text[small] / 1e6:.1f} MB in the first {small}), "
        f"{tokens.get(large, 0):,} tokens without separators; {args.copies} "
        + ("copy of the text" if args.copies == 1 else "copies of the text (which favors encoders that cache words)")
        + f", novels cut into documents of about {DOCUMENT_BYTES / 1000} KB; {args.num_proc} worker processes, "
        f"{args.rounds} rounds; all contenders that keep the complete text count the same tokens",
    ]


def as_json(args: argparse.Namespace, sizes: list[int], results: dict[str, Any]) -> dict[str, Any]:
    """Return all measurements with their date, options and file sizes."""
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
