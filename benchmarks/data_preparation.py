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
import gzip
import json
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil  # accelerate brings it
import pyarrow as pa
import pyarrow.parquet


sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.preparation_contenders import Job, count
from benchmarks.processes import ROOT, kill_all
from benchmarks.side_by_side import cpu_name


DATA = Path(os.environ.get("GPT2_REPRO_TEST_DATA", ROOT.parent / "shared" / "data"))
DOCUMENT_BYTES = 4500
ROW_GROUP = 1000  # rows
MEMORY_EVERY, DISK_EVERY = 0.05, 0.25  # s
CONTENDERS = {
    "ours": "this project",
    "blog": "the blog's map, filter, save_to_disk",
    "nanogpt": "nanoGPT's map and memmap",
    "llmc": "llm.c's pool and shards",
}
KINDS = {"parquet": "parquet", "jsonl": "json"}  # ending: what `datasets` calls it


@dataclasses.dataclass
class Measured:
    """One command."""

    seconds: float
    resident: int  # bytes, the largest sum over the processes
    anonymous: int  # bytes, the same without pages of files and shared memory
    disk: int  # bytes, the most that lay in its folder
    data: int  # bytes of the finished data, without a tokenizer beside it
    counts: dict[str, int]


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


def read_documents(prose: Path) -> list[str]:
    """The documents, shuffled by a fixed seed: novels cut at paragraph ends, web pages as they are."""
    documents = []
    for name, is_whole in (("novels", False), ("gov_web", True)):
        with gzip.open(prose / f"{name}.jsonl.gz", "rt", encoding="utf-8") as lines:
            for line in lines:
                text = json.loads(line)["text"]
                documents += [text] if is_whole else cut(text)
    documents = [document for document in documents if document.strip() and "<|endoftext|>" not in document]
    random.Random(0).shuffle(documents)
    return documents


def cut(text: str) -> list[str]:
    """Pieces of about DOCUMENT_BYTES that end with a paragraph; joined they are the text."""
    pieces, held, size = [], [], 0
    for paragraph in text.replace("\n\n", "\n\n\0").split("\0"):
        length = len(paragraph.encode())
        if held and size + length / 2 > DOCUMENT_BYTES:
            pieces.append("".join(held))
            held, size = [], 0
        held.append(paragraph)
        size += length
    return [*pieces, "".join(held)]


def write_corpus(folder: Path, documents: list[str], copies: int, files: int, compression: str) -> list[int]:
    """The same documents as parquet and as jsonl files; returns the UTF-8 bytes of each file's text."""
    folder.mkdir()
    everything = documents * copies
    sizes = []
    for number in range(files):
        part = everything[len(everything) * number // files : len(everything) * (number + 1) // files]
        sizes.append(sum(len(document.encode()) for document in part))
        path = folder / f"part-{number:04d}.parquet"
        pyarrow.parquet.write_table(pa.table({"text": part}), path, compression=compression, row_group_size=ROW_GROUP)
        with path.with_suffix(".jsonl").open("w", encoding="utf-8") as out:
            out.writelines(json.dumps({"text": document}, ensure_ascii=False) + "\n" for document in part)
    return sizes


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


def agreed_tokens(results: dict[str, dict[str, dict[int, list[Measured]]]]) -> dict[int, int]:
    """Tokens of text for each size. Exits where contenders that keep all the text count them differently."""
    found: dict[int, dict[int, set[str]]] = {}
    for ending, of_kind in results.items():
        for name, of_contender in of_kind.items():
            for files, rounds in of_contender.items():
                for measured in rounds if name != "blog" else ():
                    who = found.setdefault(files, {}).setdefault(measured.counts["text_tokens"], set())
                    who.add(f"{name} from {ending}")
    for files, who in found.items():
        if len(who) > 1:
            sys.exit(f"the counts of text tokens of {files} files differ: {who}")
    return {files: next(iter(who)) for files, who in found.items()}


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


def table(of_kind: dict[str, dict[int, list[Measured]]], text: dict[int, int], tokens: dict[int, int]) -> str:
    """Medians of the rounds, in Markdown; peaks of all rounds."""
    small, large = text
    lines = [
        "| contender | s, whole command (min to max) | MB/s | tokens/s | MB/s, marginal "
        "| this project's speed to its, whole | marginal | peak memory (anonymous) | bytes a token | peak disk |",
        "|" + " --- |" * 10,
    ]
    times = {name: tuple(_median(of_size[files]) for files in (small, large)) for name, of_size in of_kind.items()}
    for name, of_size in of_kind.items():
        few, all_ = times[name]
        seconds = [measured.seconds for measured in of_size[large]]
        ratios = ["-", "-"]
        if "ours" in times:
            ours_few, ours = times["ours"]
            ratios = [f"{all_ / ours:.2f}", _ratio(all_ - few, ours - ours_few)]
        more = (text[large] - text[small]) / 1e6
        marginal = f"{more / (all_ - few):.2f}" if all_ > few else "not measurable"
        worst = {key: max(getattr(m, key) for m in of_size[large]) for key in ("resident", "anonymous", "disk")}
        last = of_size[large][-1]
        kept = last.counts["text_tokens"] + last.counts["separators"]
        per_second = f"{tokens[large] / all_:,.0f}" if large in tokens else "-"
        lines.append(
            f"| {CONTENDERS[name]} | {all_:.1f} ({min(seconds):.1f} to {max(seconds):.1f}) "
            f"| {text[large] / 1e6 / all_:.2f} | {per_second} | {marginal} | {ratios[0]} | {ratios[1]} "
            f"| {worst['resident'] / 1e9:.2f} GB ({worst['anonymous'] / 1e9:.2f}) | {last.data / kept:.2f} "
            f"| {worst['disk'] / 1e6:,.0f} MB |"
        )
    return "\n".join(lines)


def remarks(of_kind: dict[str, dict[int, list[Measured]]], large: int, tokens: dict[int, int]) -> list[str]:
    """What contenders leave out or add."""
    lines = []
    if "blog" in of_kind:
        found = of_kind["blog"][large][-1].counts
        dropped = f"{tokens[large] - found['text_tokens']:,}" if large in tokens else "the other"
        lines.append(
            f"- The blog's keeps {found['text_tokens']:,} tokens in {found['kept_windows']:,} of {found['windows']:,} "
            f"windows, drops {dropped} tokens, adds {found['padding']:,} of padding and no separator."
        )
    if "ours" in of_kind:
        found = of_kind["ours"][large][-1].counts
        lines.append(f"- This project's last {found['dropped_tokens']:,} tokens of its splits fill no row.")
    return lines


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


def _median(rounds: list[Measured]) -> float:
    return statistics.median(measured.seconds for measured in rounds)


def _ratio(theirs: float, ours: float) -> str:
    return f"{theirs / ours:.2f}" if theirs > 0 and ours > 0 else "not measurable"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "absent"


if __name__ == "__main__":
    main()
