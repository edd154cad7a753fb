"""Check the measurements of data_preparation.py and write Markdown tables."""

import dataclasses
import statistics
import sys


CONTENDERS = {
    "ours": "this project",
    "blog": "the blog's map, filter, save_to_disk",
    "nanogpt": "nanoGPT's map and memmap",
    "llmc": "llm.c's pool and shards",
}


@dataclasses.dataclass
class Measured:
    """Measurements of one data preparation command."""

    seconds: float
    resident: int  # bytes, peak of the sum over the processes
    anonymous: int  # bytes, as `resident` without pages of files and shared memory
    disk: int  # bytes, peak size of the contender's folder
    data: int  # bytes of the finished data, without the tokenizer
    counts: dict[str, int]


def agreed_tokens(results: dict[str, dict[str, dict[int, list[Measured]]]]) -> dict[int, int]:
    """Return the number of text tokens by number of input files.

    Exits with an error if contenders that keep all the text count different numbers of tokens.
    """
    found: dict[int, dict[int, set[str]]] = {}
    for ending, of_kind in results.items():
        for name, of_contender in of_kind.items():
            for files, rounds in of_contender.items():
                for measured in rounds if name != "blog" else ():
                    who = found.setdefault(files, {}).setdefault(measured.counts["text_tokens"], set())
                    who.add(f"{name} from {ending}")
    for files, who in found.items():
        if len(who) > 1:
            sys.exit(f"Contenders count different numbers of text tokens in {files} files: {who}")
    return {files: next(iter(who)) for files, who in found.items()}


def table(of_kind: dict[str, dict[int, list[Measured]]], text: dict[int, int], tokens: dict[int, int]) -> str:
    """Return a Markdown table with the median times and peak memory of all rounds."""
    small, large = text
    lines = [
        "| contender | seconds, complete command (min to max) | MB/s | tokens/s | marginal MB/s "
        "| our speedup | our marginal speedup | peak memory (anonymous) | bytes per token | peak disk |",
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
    """Return Markdown lines with the numbers of tokens that contenders drop or add."""
    lines = []
    if "blog" in of_kind:
        found = of_kind["blog"][large][-1].counts
        dropped = f"{tokens[large] - found['text_tokens']:,}" if large in tokens else "the other"
        lines.append(
            f"- The blog keeps {found['text_tokens']:,} tokens in {found['kept_windows']:,} of {found['windows']:,} "
            f"windows, drops {dropped} tokens, and adds {found['padding']:,} padding tokens and no separators."
        )
    if "ours" in of_kind:
        found = of_kind["ours"][large][-1].counts
        lines.append(f"- This project drops {found['dropped_tokens']:,} tokens that do not fill a row.")
    return lines


def _median(rounds: list[Measured]) -> float:
    return statistics.median(measured.seconds for measured in rounds)


def _ratio(theirs: float, ours: float) -> str:
    return f"{theirs / ours:.2f}" if theirs > 0 and ours > 0 else "not measurable"
