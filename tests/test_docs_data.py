"""The commands and tables in docs/data.md agree with the code."""

import csv
import gzip
import json
import re
import shlex
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from gpt2_repro.recipe import parse_recipe

import prepare_data
from gpt2_repro.data.arguments import DataArguments
from gpt2_repro.data.sources.opening import SOURCE_NAMES, mixed, validation_sets
from gpt2_repro.data.sources.presets import PRESETS, table


ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(:[^@:]+)?(@\S+)?")


def preparations(page: Path) -> list[str]:
    """Return the commands in a page that start with `python prepare_data.py`."""
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))
    return [line for line in lines + inline if line.startswith("python prepare_data.py")]


def words_of(command: str) -> list[str]:
    return shlex.split(re.sub(r"\s#\s.*", "", command))[2:]  # shlex would cut SOURCE#COLUMN too


ALL = [command for page in PAGES for command in preparations(page)]
OFFLINE = [command for command in preparations(ROOT / "docs" / "data.md") if re.search(r"--data_files|'", command)]


def test_every_preparation_parses_and_names_sources_that_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert len(ALL) >= 20 and len(OFFLINE) >= 8
    for words in map(words_of, ALL):
        if {"--help", "--list_sources"} & set(words):
            continue
        args = parse_recipe(words, data=DataArguments, options=prepare_data.OPTIONS).data
        sources = [] if args.data_files else [name for name, _ in mixed(args.source)]
        for source in [*sources, *validation_sets(args).values()]:
            name = source.partition("#")[0]
            assert name in SOURCE_NAMES or HUB_ID.fullmatch(name) or "*" in name, words


@pytest.fixture
def own_files(documents: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Create the files that the commands in docs/data.md read.

    The files are in a temporary folder, which becomes the working directory.
    """
    monkeypatch.chdir(tmp_path)
    Path("recipes").symlink_to(ROOT / "recipes")
    for folder in ("books", "notes", "more", "shards", "web"):
        Path(folder).mkdir()
    for number in range(3):
        Path("books", f"{number}.txt").write_text("\n\n".join(documents), encoding="utf-8")
    Path("shakespeare.txt").write_text("\n\n".join(documents), encoding="utf-8")
    Path("notes", "a.txt").write_text("\n".join(documents[:50]), encoding="utf-8")
    columns = {"text": documents, "content": documents}
    pyarrow.parquet.write_table(pa.table(columns), Path("more", "a.parquet"))
    with Path("articles.csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([["id", "body"], *enumerate(documents)])
    with gzip.open("web/a.jsonl.gz", "wt") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in documents)
    ids = np.resize(np.arange(300, dtype=np.uint16), 3000)  # ids of train:300; the last id is the separator
    for split in ("train", "val"):
        ids.tofile(f"{split}.bin")
        np.roll(ids, 1).tofile(f"shards/x_{split}_000001.bin")


@pytest.mark.parametrize("command", OFFLINE)
def test_every_command_on_own_files_prepares_a_folder(command: str, own_files: None, capsys) -> None:
    words = words_of(command)
    small = ["--num_proc", "1", "--sequence_length", "16", "--validation_tokens", "200"]
    if "hash" in words:
        small += ["--validation_fraction", "0.2"]
    if any(word.endswith(".bin") for word in words):
        prepare_data.main(["--data_files", "books/*.txt", "--tokenizer", "train:300", "--dataset_dir", "made", *small])
        small += ["--tokenizer", "made/tokenizer"]
    else:
        small += ["--tokenizer", "train:300"]
    prepare_data.main([*words, *small])
    shown = shlex.split(capsys.readouterr().out.splitlines()[-1])
    folder = Path(shown[shown.index("--dataset_dir") + 1])
    assert "--dataset_dir" not in words or str(folder) == words[words.index("--dataset_dir") + 1]
    assert {"train", "validation"} <= json.loads((folder / "manifest.json").read_text(encoding="utf-8"))[
        "counts"
    ].keys()


def rows_under(heading: str) -> list[list[str]]:
    """Return the rows of the first table after a heading of docs/data.md.

    A row is a list of cells. The header of the table is not included.
    """
    section = PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    lines = section[section.index("| ---") :].partition("\n\n")[0].splitlines()[1:]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


def test_the_tables_of_sources_are_those_of_the_presets() -> None:
    form = re.compile(r"^(\S+) +(\S+ [GM]B) +(\S+B) +(\S+ [GM]B) +(\S+ [GM]B) +((?:\d+ h )?\d+ min)  ", re.MULTILINE)
    few, many = ({name: cells for name, *cells in form.findall(table(workers))} for workers in (2, 8))
    expected = [[f"`{name}`", of.repository, *few[name], many[name][-1]] for name, of in PRESETS.items()]
    assert rows_under("Sizes and times") == expected
    assert [row[0] for row in rows_under("Choose a source")] == [f"`{name}`" for name in SOURCE_NAMES]


def test_the_table_of_the_manifest_has_every_key_of_one(own_files: None) -> None:
    words = ["--source", "more/a.parquet=0.5,books/*.txt=0.5", "--validation_sets", "notes=notes/*.txt"]
    words += ["--tokenizer", "train:300", "--sequence_length", "16", "--validation_tokens", "200", "--num_proc", "1"]
    prepare_data.main([*words, "--dataset_dir", "out"])
    manifest = json.loads(Path("out/manifest.json").read_text(encoding="utf-8"))
    shown = {row[0].strip("`"): set(re.findall(r"`(\w+)`", row[1])) for row in rows_under("What the folder holds")}
    assert list(shown) == list(manifest)
    assert set(manifest["counts"]["train"]) == shown["counts"]
