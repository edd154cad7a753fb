"""Compare the data preparation of this project with those of nanoGPT and llm.c.

    python benchmarks/data_preparation.py
    python benchmarks/data_preparation.py --copies 10 --num_proc 8 --only nanogpt llmc ours

The methods of nanoGPT and llm.c were implemented again from their descriptions. Each contender reads the same files and
writes data that is ready for training. Each is one command in a fresh process with separate caches, and its time
includes imports. The contenders run in the given order in odd rounds and in reverse order in even rounds. The input
files are in the page cache.

Each contender prepares a small data set (only the first files) and a large one (all files). MB/s is the speed of the
complete command with all files. The marginal MB/s excludes the start-up time: it divides the additional text of the
large data set by the additional time.

Peak memory is the sum of the resident sets of the process and its descendants. A page that several processes map counts
once for each process. Pages of mapped files are included. Peak disk is the size of the contender's folder, caches
included.

Only this project hashes its data and waits until the data is on the disk. For at most 5M training tokens, this project
also computes unigram and bigram losses for its manifest. All of this is included in the time of this project.

The text consists of novels and web pages of US authorities, in random order. The novels are cut at paragraph ends into
documents of about 4.5 KB, the size of web documents. The web pages are complete. --copies repeats the text. Repeated
text favors encoders that cache words, because these encoders have already seen every word.
"""

import argparse
import contextlib
import dataclasses
import functools
import gzip
import json
import multiprocessing
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil


sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.machine import cpu_seconds, print_header
from benchmarks.processes import ROOT, run_python


DATA = Path(os.environ.get("GPT2_REPRO_TEST_DATA", ROOT.parent / "shared" / "data"))
FORMATS = {"parquet": "parquet", "jsonl": "json"}  # file ending: name of the format in `datasets`
DOCUMENT_BYTES = 4500
END_OF_TEXT = 50_256
LLMC_SHARD, LLMC_HEADER = 100_000_000, [20240520, 1]  # tokens; magic number and version


@dataclasses.dataclass(frozen=True)
class Job:
    """Input files, tokenizer, output folder and number of processes of a preparation."""

    kind: str  # parquet or json, a format name of `datasets`
    files: list[str]
    tokenizer: str  # folder with GPT-2's tokenizer.json, vocab.json and merges.txt
    folder: str  # output folder of the finished data
    processes: int

    def load(self, *, num_proc: int | None) -> Any:
        """Load the files with the library `datasets`, which caches them on the disk."""
        from datasets import load_dataset

        return load_dataset(self.kind, data_files=self.files, split="train", num_proc=num_proc)


def nanogpt(job: Job) -> None:
    """Prepare data as in nanoGPT's data/openwebtext/prepare.py."""
    splits = job.load(num_proc=job.processes).train_test_split(test_size=0.0005, seed=2357, shuffle=True)
    gpt2_encoding(job.tokenizer)  # load it before the fork, so that workers inherit it

    def tokenize(row: dict[str, str]) -> dict[str, Any]:
        ids = [*gpt2_encoding(job.tokenizer).encode_ordinary(row["text"]), END_OF_TEXT]
        return {"ids": ids, "len": len(ids)}

    tokens = splits.map(tokenize, remove_columns=["text"], num_proc=job.processes)
    Path(job.folder).mkdir(parents=True)
    for split, name in (("train", "train.bin"), ("test", "val.bin")):
        rows, place = tokens[split], 0
        total = int(np.sum(rows["len"], dtype=np.uint64))
        out = np.memmap(Path(job.folder, name), np.uint16, "w+", shape=(total,))
        batches = min(1024, len(rows))
        for batch in range(batches):
            shard = rows.shard(num_shards=batches, index=batch, contiguous=True).with_format("numpy")
            ids = np.concatenate(shard["ids"][:])
            out[place : place + len(ids)] = ids
            place += len(ids)
        out.flush()


def llmc(job: Job) -> None:
    """Prepare data as in llm.c's dev/data/fineweb.py."""
    rows = job.load(num_proc=None)
    gpt2_encoding(job.tokenizer)
    Path(job.folder).mkdir(parents=True)
    shard, filled, shards = np.empty(LLMC_SHARD, np.uint16), 0, 0
    with multiprocessing.get_context("fork").Pool(job.processes) as pool:
        for ids in pool.imap(functools.partial(llmc_document, job.tokenizer), rows, chunksize=16):
            while len(ids):
                taken = ids[: LLMC_SHARD - filled]
                shard[filled : filled + len(taken)] = taken
                filled, ids = filled + len(taken), ids[len(taken) :]
                if filled == LLMC_SHARD:
                    write_llmc_shard(job.folder, shards, shard)
                    filled, shards = 0, shards + 1
    write_llmc_shard(job.folder, shards, shard[:filled])


def llmc_document(tokenizer: str, row: dict[str, str]) -> np.ndarray:
    return np.array([END_OF_TEXT, *gpt2_encoding(tokenizer).encode_ordinary(row["text"])]).astype(np.uint16)


def write_llmc_shard(folder: str, number: int, ids: np.ndarray) -> None:
    header = np.array([*LLMC_HEADER, len(ids), *[0] * 253], np.int32)
    Path(folder, f"shard_{number:06d}.bin").write_bytes(header.tobytes() + ids.tobytes())


CONTENDERS = {"nanogpt": nanogpt, "llmc": llmc}
NAMES = {
    "ours": "this project",
    "nanogpt": "nanoGPT's map and memmap",
    "llmc": "llm.c's pool and shards",
}


@functools.cache
def gpt2_encoding(tokenizer: str) -> Any:
    """Load tiktoken's GPT-2 encoding from the files in a folder, without network."""
    os.environ["TIKTOKEN_CACHE_DIR"] = ""  # do not copy local files to the temporary folder
    import tiktoken
    from tiktoken.load import data_gym_to_mergeable_bpe_ranks
    from tiktoken_ext.openai_public import r50k_pat_str

    merges, vocabulary = (str(Path(tokenizer, name)) for name in ("merges.txt", "vocab.json"))
    ranks = data_gym_to_mergeable_bpe_ranks(vocab_bpe_file=merges, encoder_json_file=vocabulary)
    special = {"<|endoftext|>": END_OF_TEXT}
    return tiktoken.Encoding("gpt2_local", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens=special)


def count(name: str, folder: Path) -> dict[str, int]:
    """Count the `tokens` of text and the `separators` that a contender has written."""
    if name == "ours":
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        empty, tokens = (
            sum(split[key] for split in manifest["counts"].values()) for key in ("empty_documents", "tokens")
        )
        separators = manifest["read"]["documents"] - empty  # a document may be cut between splits
        return {"tokens": tokens - separators, "separators": separators}
    header = 0 if name == "nanogpt" else 1024  # bytes
    pieces = [np.fromfile(path, np.uint16, offset=header) for path in folder.glob("*.bin")]
    separators = sum(int((ids == END_OF_TEXT).sum()) for ids in pieces)
    return {"tokens": sum(map(len, pieces)) - separators, "separators": separators}


def read_documents(prose: Path) -> list[str]:
    """Read novels and web pages, and return their documents in random order."""
    documents: list[str] = []
    for name in ("novels", "gov_web"):
        with gzip.open(prose / f"{name}.jsonl.gz", "rt", encoding="utf-8") as lines:
            for text in (json.loads(line)["text"] for line in lines):
                documents += cut(text) if name == "novels" else [text]
    documents = [document for document in documents if document.strip() and "<|endoftext|>" not in document]
    random.Random(0).shuffle(documents)
    return documents


def cut(text: str) -> Iterator[str]:
    """Cut text at paragraph ends into pieces of about DOCUMENT_BYTES bytes."""
    held, size = "", 0
    for paragraph in text.replace("\n\n", "\n\n\0").split("\0"):
        length = len(paragraph.encode())
        if held and size + length / 2 > DOCUMENT_BYTES:
            yield held
            held, size = "", 0
        held, size = held + paragraph, size + length
    yield held


def write_corpus(folder: Path, documents: list[str], files: int) -> list[int]:
    """Write the documents to `files` parquet files and again to `files` jsonl files.

    Returns the size of the text of each file in UTF-8 bytes.
    """
    import pyarrow.parquet

    folder.mkdir()
    sizes = []
    for number in range(files):
        part = documents[len(documents) * number // files : len(documents) * (number + 1) // files]
        sizes.append(sum(len(document.encode()) for document in part))
        path = folder / f"part-{number:04d}.parquet"
        pyarrow.parquet.write_table(pyarrow.table({"text": part}), path, compression="zstd", row_group_size=1000)
        with path.with_suffix(".jsonl").open("w", encoding="utf-8") as out:
            out.writelines(json.dumps({"text": document}, ensure_ascii=False) + "\n" for document in part)
    return sizes


class Measured(NamedTuple):
    """Seconds, and peaks of memory and disk in bytes, of one data preparation."""

    seconds: float
    cpu_seconds: float
    memory: int
    disk: int
    counts: dict[str, int]


def run(name: str, job: Job, work: Path, validation_tokens: int) -> Measured:
    """Run one contender in an empty folder and return its measurements."""
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    for path in job.files:
        Path(path).read_bytes()  # load it into the page cache
    os.sync()  # write earlier data to the disk now, not during the measurement
    words = ["benchmarks/data_preparation.py", name, json.dumps(dataclasses.asdict(job))]
    if name == "ours":
        words = ["prepare_data.py", "--data_files", *job.files, "--tokenizer", job.tokenizer]
        words += ["--dataset_dir", job.folder, "--num_proc", str(job.processes)]
        words += ["--validation_tokens", str(validation_tokens)]
    os.environ |= {"HF_HOME": str(work / "cache"), "HF_HUB_OFFLINE": "1"}
    looked = memory = disk = 0.0

    def sample() -> bool:
        nonlocal looked, memory, disk
        if time.monotonic() - looked < 0.1:
            return False
        resident = used = 0
        with contextlib.suppress(psutil.Error, FileNotFoundError):  # they may end or be deleted meanwhile
            resident = sum(process.memory_info().rss for process in psutil.Process().children(recursive=True))
            used = sum(path.lstat().st_blocks * 512 for path in work.rglob("*"))
        looked, memory, disk = time.monotonic(), max(memory, resident), max(disk, used)
        return False

    before = cpu_seconds()
    seconds = run_python(words, log=work / "log", timeout=1800, stop=sample).seconds
    cpu = cpu_seconds() - before
    counts = count(name, Path(job.folder))
    shutil.rmtree(work)
    return Measured(seconds, cpu, int(memory), int(disk), counts)


def table(results: dict[str, tuple[list[Measured], list[Measured]]], text: tuple[int, int]) -> str:
    """Return a Markdown table.

    Args:
        results: the rounds with few and with all files, by contender.
        text: bytes of the text in few and in all files.
    """
    lines = [
        "| contender | CPU s | seconds, complete command (min to max) | MB/s | marginal MB/s | our speedup "
        "| our marginal speedup | peak memory | peak disk | text tokens |",
        "|" + " --- |" * 10,
    ]
    ours_few, ours_all = (statistics.median(one.seconds for one in rounds) for rounds in results["ours"])
    for name, (few, complete) in results.items():
        seconds = [one.seconds for one in complete]
        median = statistics.median(seconds)
        more = median - statistics.median(one.seconds for one in few)
        cells = [
            f"{statistics.median(one.cpu_seconds for one in complete):.1f}",
            f"{median:.1f} ({min(seconds):.1f} to {max(seconds):.1f})",
            f"{text[1] / 1e6 / median:.2f}",
            f"{(text[1] - text[0]) / 1e6 / more:.2f}",
            f"{median / ours_all:.2f}",
            f"{more / (ours_all - ours_few):.2f}",
            f"{max(one.memory for one in complete) / 1e9:.2f} GB",
            f"{max(one.disk for one in complete) / 1e6:,.0f} MB",
            f"{complete[-1].counts['tokens']:,}",
        ]
        lines.append(f"| {NAMES[name]} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Write the corpus, measure the contenders, and print Markdown tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num_proc", type=int, default=2, help="Worker processes of each contender. (default: 2)")
    parser.add_argument("--copies", type=int, default=1, help="Number of times to repeat the text. (default: 1)")
    parser.add_argument("--files", type=int, default=8, help="Number of files that contain the text. (default: 8)")
    parser.add_argument("--small", type=int, help="Number of files in the small data set. (default: --files / 4)")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument(
        "--only", nargs="+", choices=NAMES, default=list(NAMES), help="Contenders to run besides ours."
    )
    parser.add_argument("--rounds", type=int, default=2, help="Repetitions per contender and size. (default: 2)")
    args = parser.parse_args()
    names, files = list(dict.fromkeys(["ours", *args.only])), (args.small or max(1, args.files // 4), args.files)
    with tempfile.TemporaryDirectory(prefix="data_preparation-") as root:
        corpus, work = Path(root, "corpus"), Path(root, "work")
        sizes = write_corpus(corpus, read_documents(DATA / "prose") * args.copies, args.files)
        text = (sum(sizes[: files[0]]), sum(sizes))
        print_header("datasets", "transformers", "tokenizers", "tiktoken", "pyarrow", "numpy", "fastokens")
        print(f"{text[1] / 1e6:.1f} MB of text; {text[0] / 1e6:.1f} MB in the small data set")
        for ending in args.formats:
            results: dict[str, tuple[list[Measured], list[Measured]]] = {name: ([], []) for name in names}
            for turn in range(args.rounds):
                for name in names if turn % 2 == 0 else reversed(names):
                    for size, rounds, number in zip(text, results[name], files, strict=True):
                        chosen = [str(path) for path in sorted(corpus.glob(f"*.{ending}"))[:number]]
                        job = Job(FORMATS[ending], chosen, str(DATA / "gpt2"), str(work / "data"), args.num_proc)
                        rounds.append(run(name, job, work, min(100_000, size // 40)))  # validation: at most a tenth
                        print(f"round {turn + 1} {ending} {name} {number} files: {rounds[-1]}", file=sys.stderr)
            print(f"\n{ending}:\n\n{table(results, text)}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in CONTENDERS:
        CONTENDERS[sys.argv[1]](Job(**json.loads(sys.argv[2])))
    else:
        main()
