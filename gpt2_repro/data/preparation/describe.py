"""What a prepared folder says of itself: its manifest and the text of its validation documents."""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from gpt2_repro.data.arguments import DataArguments
from gpt2_repro.data.encoder import Encoder
from gpt2_repro.data.preparation.splits import Group
from gpt2_repro.data.preparation.tokenizing import EXAMPLES
from gpt2_repro.data.prepared import request_of
from gpt2_repro.data.reference_losses import MAX_TOKENS, reference_losses
from gpt2_repro.data.rows import open_rows
from gpt2_repro.data.shards import WrittenRows
from gpt2_repro.data.sources.opening import Source
from gpt2_repro.data.sources.text_files import TextFile
from gpt2_repro.data.sources.token_files import TokenFile
from gpt2_repro.files import sha256_of
from gpt2_repro.manifest import MANIFEST, Manifest, ReadCounts, SplitCounts


@dataclasses.dataclass(frozen=True)
class Opened:
    """What a preparation draws from: the sources of training and those of further validation sets, by name."""

    sources: list[Source]
    sets: dict[str, Source]

    def described(self) -> dict[str, Any]:
        sets = {name: source.description for name, source in self.sets.items()}
        of_training = [source.description | {"weight": source.weight} for source in self.sources]
        return json.loads(json.dumps({"sources": of_training, "validation_sets": sets}))

    def changed(self) -> list[int]:
        """When each local file was changed last [nanoseconds]: none of a finished folder's content."""
        files = [file for s in [*self.sources, *self.sets.values()] for file in [*s.files, *s.validation_files]]
        return [Path(file.name).stat().st_mtime_ns for file in files if isinstance(file, TextFile | TokenFile)]


def describe(
    folder: Path,
    args: DataArguments,
    opened: Opened,
    groups: Sequence[Group],
    encoder: Encoder,
    counts: dict[str, SplitCounts],
    written: dict[str, WrittenRows],
) -> Manifest:
    """The manifest of a folder whose rows are written."""
    facts = [part.facts for group in groups for parts in group.streams for part in parts]
    described = opened.described()
    source = described["sources"][0]
    if len(described["sources"]) > 1:
        source = {"name": args.source, "sources": described["sources"]}
    packages = {"datasets", "pyarrow", "numpy", "tokenizers", encoder.engine}
    kept = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".arrow"]
    losses = None
    if counts["train"].tokens <= MAX_TOKENS:
        train, validation = (open_rows(folder / split).joined() for split in ("train", "validation"))
        losses = reference_losses(train, validation, encoder.vocab_size)
    return Manifest(
        request=request_of(args),
        source=source,
        validation_sets=described["validation_sets"],
        tokenizer_sha256=sha256_of(folder / "tokenizer" / "tokenizer.json"),
        vocab_size=encoder.vocab_size,
        largest_id=max(rows.largest_id for rows in written.values()),
        bytes_per_token=encoder.dtype.itemsize,
        counts=counts,
        read=ReadCounts(
            documents=sum(of["documents"] for of in facts),
            text_bytes=sum(of["text_bytes"] for of in facts),
            longest_document_tokens=max(of["longest"] for of in facts),
            bad_documents=sum(of["bad"] for of in facts),
            bad_examples=[line for of in facts for line in of["bad_examples"]][:EXAMPLES],
        ),
        sha256={split: rows.sha256 for split, rows in written.items()},
        shards={split: rows.shards for split, rows in written.items()},
        files={str(path.relative_to(folder)): sha256_of(path) for path in sorted(kept) if path.name != MANIFEST},
        versions={name: version(name) for name in sorted(packages)},
        reference_losses=losses,
    )


def write_validation_text(folder: Path, groups: Sequence[Group]) -> None:
    """The documents of the split validation, a line each. Of a part they were kept in their order."""
    folder.mkdir(exist_ok=True)
    group = next(group for group in groups if "validation" in group.splits)
    reading: dict[int, tuple[int, Iterator[tuple[int, str]]]] = {}  # of each stream the part that is read
    with (folder / "validation.jsonl").open("w", encoding="utf-8") as out:
        for run in group.found():
            if run.split != "validation":
                continue
            if reading.get(run.stream, (-1,))[0] != run.part:
                reading[run.stream] = run.part, group.streams[run.stream][run.part].texts()
            texts = reading[run.stream][1]
            for number in range(run.first_document, run.first_document + len(run.lengths)):
                text = next(text for kept, text in texts if kept == number)
                out.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
