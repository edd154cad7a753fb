"""Measure the memory and time of `--tokenizer train` for languages without spaces, and the quality of the result.

    python benchmarks/tokenizer_training.py
    python benchmarks/tokenizer_training.py --languages chinese --sizes 10 40 --contenders bounded complete
    python benchmarks/tokenizer_training.py --languages chinese --sizes 100 --prepare

The text is synthetic: a paragraph is a sequence of words without spaces, a word has 1 to 4 characters or syllables of
its script, and the words have Zipf frequencies. With --punctuation 0.1, a tenth of the words ends with a comma.

`bounded` is the code of this project. `complete` trains on the complete paragraphs without any limit. Each is one
process, and its peak memory is its largest resident set. Compression is the number of bytes per token of held-out text
with the same vocabulary of words.
"""

import argparse
import dataclasses
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np


sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.machine import cpu_seconds, print_columns, print_header, print_row
from benchmarks.processes import run_python


WORDS = 50_000
HELD_OUT_MB = 1.0


def chinese(draw: np.random.Generator) -> str:
    """Return a character of 3,500, of which some are frequent."""
    return chr(0x4E00 + 5 * int(3500 * draw.random() ** 2))


def japanese(draw: np.random.Generator) -> str:
    """Return a kanji of 2,000 or a hiragana."""
    if draw.random() < 0.4:
        return chr(0x4E00 + 7 * int(2000 * draw.random() ** 2))
    return chr(draw.integers(0x3041, 0x3097))


def thai(draw: np.random.Generator) -> str:
    """Return a syllable: a consonant, usually with a vowel sign or a tone mark."""
    syllable = chr(draw.integers(0x0E01, 0x0E2F))
    if draw.random() < 0.7:
        syllable += draw.choice([*map(chr, range(0x0E30, 0x0E3A))])
    if draw.random() < 0.3:
        syllable += chr(draw.integers(0x0E48, 0x0E4C))
    return syllable


LANGUAGES: dict[str, Callable[[np.random.Generator], str]] = {
    "chinese": chinese,
    "japanese": japanese,
    "thai": thai,
}


def paragraphs(language: str, megabytes: float, *, seed: int, punctuation: float) -> Iterator[str]:
    """Yield paragraphs of 200 to 2,000 characters. All seeds have the same words."""
    vocabulary = np.random.default_rng(0)
    letter = LANGUAGES[language]
    lengths = vocabulary.choice([1, 2, 3, 4], size=WORDS, p=[0.1, 0.55, 0.2, 0.15])
    words = ["".join(letter(vocabulary) for _ in range(length)) for length in lengths]
    weights = np.cumsum(1 / np.arange(3, WORDS + 3))
    draw = np.random.default_rng(seed)
    written = 0
    while written < 1e6 * megabytes:
        length = int(draw.integers(200, 2001))
        numbers = np.searchsorted(weights, draw.random(length) * weights[-1]).tolist()
        commas = (draw.random(length) < punctuation).tolist()
        parts = [words[number] + "，" * comma for number, comma in zip(numbers, commas, strict=True)]
        text = "".join(parts)[:length]
        yield text
        written += len(text.encode())


@dataclasses.dataclass(frozen=True)
class Job:
    """One training of a tokenizer, for a process of its own."""

    contender: str
    text: str
    held_out: str
    vocab_size: int


def texts_of(path: str) -> Iterator[str]:
    with Path(path).open(encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)["text"]


def train(job: Job) -> None:
    """Train a tokenizer and print seconds, peak memory in bytes and bytes per token of the held-out text."""
    from gpt2_repro.data.tokenizer import train_tokenizer, training_text

    documents = texts_of(job.text)
    began = time.perf_counter()
    tokenizer = train_tokenizer(training_text(documents) if job.contender == "bounded" else documents, job.vocab_size)
    seconds = time.perf_counter() - began
    memory = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    held_out = [*texts_of(job.held_out)]
    tokens = sum(len(encoding.ids) for encoding in tokenizer.encode_batch_fast(held_out))
    compression = sum(len(text.encode()) for text in held_out) / tokens
    print(json.dumps({"seconds": seconds, "memory": memory, "compression": compression}))


def write_text(path: Path, texts: Iterator[str]) -> None:
    with path.open("w", encoding="utf-8") as out:
        for text in texts:
            out.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")


def measure_training(args: argparse.Namespace, folder: Path) -> None:
    """Train the tokenizers and print a row for each."""
    print_columns("text", "MB", "contender", "seconds", "peak memory", "bytes per token of held-out text")
    for language in args.languages:
        held_out = folder / "held_out.jsonl"
        write_text(held_out, paragraphs(language, HELD_OUT_MB, seed=1, punctuation=args.punctuation))
        for size in args.sizes:
            text = folder / "text.jsonl"
            write_text(text, paragraphs(language, size, seed=2, punctuation=args.punctuation))
            for contender in args.contenders:
                job = json.dumps(dataclasses.asdict(Job(contender, str(text), str(held_out), args.vocab_size)))
                command = [sys.executable, __file__, "job", job]
                result = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
                memory = f"{result['memory'] / 1e9:.2f} GB"
                compression = f"{result['compression']:.3f}"
                print_row(language, size, contender, f"{result['seconds']:.0f}", memory, compression)


def measure_preparation(args: argparse.Namespace, folder: Path) -> None:
    """Run prepare_data.py with recipes/own_language.yaml, and print a row for each size."""
    print_columns("text", "MB", "seconds", "CPU s", "memory of the largest process")
    for language in args.languages:
        for size in args.sizes:
            text = folder / f"{language}-{size}.jsonl"
            write_text(text, paragraphs(language, size, seed=2, punctuation=args.punctuation))
            words = ["prepare_data.py", "recipes/own_language.yaml", "--data_files", str(text)]
            words += ["--tokenizer", f"train:{args.vocab_size}"]
            words += ["--dataset_dir", str(folder / "prepared"), "--overwrite"]
            before = cpu_seconds()
            finished = run_python(words, log=folder / "log", timeout=3600)
            memory = 1024 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
            cpu = f"{cpu_seconds() - before:.0f}"
            print_row(language, size, f"{finished.seconds:.0f}", cpu, f"{memory / 1e9:.2f} GB")


def main() -> None:
    """Measure the training of tokenizers, or complete preparations."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--languages", nargs="+", choices=LANGUAGES, default=list(LANGUAGES))
    parser.add_argument("--sizes", nargs="+", type=float, default=[10, 100], help="MB of text. (default: 10 100)")
    parser.add_argument("--contenders", nargs="+", choices=["bounded", "complete"], default=["bounded"])
    parser.add_argument("--vocab_size", type=int, default=32_768)
    parser.add_argument("--punctuation", type=float, default=0.0, help="Share of words before a comma. (default: 0)")
    parser.add_argument("--prepare", action="store_true", help="Measure prepare_data.py instead of the training.")
    args = parser.parse_args()
    print_header("tokenizers", "fastokens")
    with tempfile.TemporaryDirectory(prefix="tokenizer_training-") as folder:
        measure = measure_preparation if args.prepare else measure_training
        measure(args, Path(folder))


if __name__ == "__main__":
    if sys.argv[1:2] == ["job"]:
        train(Job(**json.loads(sys.argv[2])))
    else:
        main()
