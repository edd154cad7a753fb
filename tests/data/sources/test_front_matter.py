"""The YAML block at the start of a Markdown file is left out, and nothing else."""

import gzip
import json
from pathlib import Path

import pytest

from gpt2_repro.data.preparation.prepare import PreparationOptions, prepare
from gpt2_repro.data.sources.base import TextForm
from gpt2_repro.data.sources.front_matter import without_front_matter
from gpt2_repro.data.sources.local_files import LocalFile
from gpt2_repro.errors import UserError
from gpt2_repro.evaluation.tasks import _read_data
from gpt2_repro.prepare import describe


TEXT = "# A note\n\nIts text.\n\n---\n\nAfter a rule: more.\n---\n"
BLOCK = """---
title: "A note: with a colon"
aliases: [first,
  second]
tags:
- one
  - two
# a comment
created: 2026-01-02 03:04
url: https://example.org

summary: >
  Two lines
  of text.
cssclasses:
---
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (BLOCK + "\n" + TEXT, TEXT),
        (BLOCK + TEXT, TEXT),
        ("---\n---\n" + TEXT, TEXT),
        ("---  \ntitle: x\n...\n\n\n" + TEXT, TEXT),
        (BLOCK, ""),
        (BLOCK.rstrip("\n"), ""),
    ],
)
def test_a_block_is_removed(text: str, expected: str) -> None:
    assert without_front_matter(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        *("", "---", "---\n", "-----\ntitle: x\n---\nText", "--- \nwithout an end: x\n\nText: y\n"),
        *(TEXT, "\n" + BLOCK + TEXT, "Text\n" + BLOCK, " ---\ntitle: x\n---\n", "---title: x\n---\n"),
        "---\n\nA paragraph between two rules.\n\n---\n\nAnother one.",
        "---\n# A title\n---\nText",
        "---\n- a list\n- between rules\n---\nText",
        "---\nhttps://example.org\n---\nText",
        "---\ntitle: x\n\nThe block was never closed.\n\n---\n\nText",
    ],
)
def test_other_text_is_unchanged(text: str) -> None:
    assert without_front_matter(text) == text


@pytest.mark.parametrize("name", ["a.md", "a.MD", "a.markdown", "a.md.gz", "a.txt", "a.jsonl"])
def test_only_markdown_files_have_front_matter(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    text = BLOCK + TEXT
    content = f"\ufeff{text}".replace("\n", "\r\n").encode()
    if name == "a.jsonl":
        content = json.dumps({"text": text}).encode()
    if name.endswith(".gz"):
        content = gzip.compress(content)
    path.write_bytes(content)
    is_markdown = name not in ("a.txt", "a.jsonl")
    for drops in (True, False):
        file = LocalFile(str(path), len(content), TextForm(drops_front_matter=drops))
        found = [batch for part in file.parts() for batch in part.read()]
        is_dropped = drops and is_markdown
        assert [batch.documents for batch in found] == [[TEXT if is_dropped else text]]
        assert found[0].front_matter == is_dropped


def test_bits_per_byte_are_those_of_the_text(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text(BLOCK + TEXT, encoding="utf-8")
    rows = _read_data("bits_per_byte_a", ["page"], tmp_path)
    assert [row["page"] for row in rows] == [TEXT]


def write_vault(folder: Path, *, front_matter: bool) -> Path:
    """Write the notes of a vault. Every second one has front matter, and one has nothing else."""
    folder.mkdir()
    for number in range(40):
        text = f"# Note {number}\n\n" + f"Some words of note {number}. " * 20 + "\n\n---\n\nAn end.\n"
        if number % 2 and front_matter:
            text = BLOCK + "\n" + text
        if number % 3 == 0:
            text = text.replace("\n", "\r\n")
        if number % 5 == 0:
            text = "\ufeff" + text
        (folder / f"{number:02}.md").write_bytes(text.encode())
    only = BLOCK if front_matter else ""
    (folder / "only.md").write_text(only, encoding="utf-8")
    return folder


def test_a_vault_gives_the_rows_of_its_text_with_any_workers(arguments, content, tmp_path: Path, capsys) -> None:
    vault = write_vault(tmp_path / "vault", front_matter=True)
    plain = write_vault(tmp_path / "plain", front_matter=False)
    form = {"split": "hash", "validation_fraction": 0.2, "validation_text": True}
    one = arguments("one", data_files=[str(vault)], **form)
    data = prepare(one)
    two = arguments("two", data_files=[str(vault)], **form)
    prepare(two, PreparationOptions(num_proc=2))
    assert content(one.dataset_dir) == content(two.dataset_dir)

    of_text = prepare(arguments("of_text", data_files=[str(plain)], **form))
    assert data.manifest.sha256 == of_text.manifest.sha256
    assert data.manifest.counts["train"].empty_documents + data.manifest.counts["validation"].empty_documents == 1
    assert data.manifest.read.front_matter == 21 and of_text.manifest.read.front_matter == 0
    describe(data, max_tokens=0)
    out = capsys.readouterr().out
    assert "21 Markdown files" in out
    assert "Only 9 of 40 documents are in the validation split" in out and "above 0.2" in out

    many = prepare(arguments("many", data_files=[str(vault)], split="hash", validation_fraction=0.4))
    describe(many, max_tokens=0)
    assert "are in the validation split" not in capsys.readouterr().out

    kept = arguments("one", data_files=[str(vault)], front_matter="keep", **form)
    with pytest.raises(UserError, match="--front_matter drop.*--front_matter keep"):
        prepare(kept)
    kept_data = prepare(arguments("kept", data_files=[str(vault)], front_matter="keep", **form))
    assert kept_data.manifest.request["front_matter"] == "keep"
    assert kept_data.manifest.sha256 != data.manifest.sha256 and kept_data.manifest.read.front_matter == 0
    describe(kept_data, max_tokens=0)
    assert "front matter" not in capsys.readouterr().out
