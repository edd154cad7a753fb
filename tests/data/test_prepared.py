"""Prepared folders are opened only if they match the recipe and their manifest."""

import argparse
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from datasets import load_from_disk

from gpt2_repro.data.arguments import DataArguments, PreparationOptions
from gpt2_repro.data.preparation.prepare import prepare
from gpt2_repro.data.prepared import PreparedData
from gpt2_repro.data.recipe import DataRecipe
from gpt2_repro.errors import UserError
from gpt2_repro.files import read_object
from gpt2_repro.tokenization import ENCODING
from tests.reference import write_jsonl


def open_for(args: DataArguments, *typed: str) -> PreparedData:
    written = {"path": Path("recipe.yaml"), "options": argparse.Namespace(), "written": {"data": vars(args)}}
    return PreparedData.open(DataRecipe(**written, typed=frozenset(typed), data=args))


def test_another_form_is_refused(arguments) -> None:
    args = arguments(packing="wrap", min_length=12)
    data = prepare(args)
    for typed in ((), ("dataset_dir",)):
        assert open_for(args, *typed) == data
        for changes, recorded in [({"packing": "concat"}, "wrap"), ({"packing": "wrap", "min_length": 8}, "12")]:
            with pytest.raises(UserError, match=f"--{list(changes)[-1]} {recorded}"):
                open_for(arguments(**changes), *typed)
    path = Path(args.dataset_dir, "manifest.json")
    manifest = read_object(path)
    manifest["request"].pop("split_seed")  # as in a manifest that is older than this option: the default applies
    path.write_text(json.dumps(manifest), encoding="utf-8")
    assert open_for(args) == prepare(args) != data


def test_ids_of_another_version_are_refused_and_can_be_replaced(arguments) -> None:
    args = arguments()
    path = prepare(args).path / "manifest.json"
    manifest = read_object(path)
    manifest["encoding"] -= 1
    path.write_text(json.dumps(manifest), encoding="utf-8")
    with pytest.raises(UserError, match="--overwrite"):
        prepare(args)
    assert prepare(args, PreparationOptions(overwrite=True)).manifest.encoding == ENCODING


@pytest.mark.parametrize("form", [{}, {"packing": "wrap", "min_length": 5}], ids=["concat", "wrap"])
def test_validation_is_the_first_rows_that_make_enough_targets(
    arguments, documents: list[str], tmp_path: Path, form: dict
) -> None:
    for name, size in (("one", 1), ("some_more", 9)):
        write_jsonl(tmp_path / f"{name}.jsonl", documents[:size])
    sets = [f"{name}={tmp_path / name}.jsonl" for name in ("one", "some_more")]
    args = arguments(**form, validation_sets=sets, validation_tokens=2000)
    data = prepare(args)
    splits = {"": "validation", "one": "validation_one", "some_more": "validation_some_more"}
    folder = load_from_disk(args.dataset_dir)
    assert set(folder) == {"train", *splits.values()} and "dataset_dict.json" in data.manifest.files
    wanted = {name: folder[split]["input_ids"][:] for name, split in splits.items()}
    main = [len(row) - 1 for row in wanted[""]]
    for tokens in (1, main[0], main[0] + 1, 200, sum(main[:5]), sum(main) - 1, sum(main), sum(main) + 1, 0):
        opened = data.validation(eval_tokens=tokens)
        assert list(opened) == list(splits)
        for name, rows in opened.items():
            before = np.cumsum([0, *(len(row) - 1 for row in wanted[name][:-1])])  # targets before each row
            cut = [row for row, start in zip(wanted[name], before, strict=True) if start < tokens or not tokens]
            assert [row.tolist() for row in rows[range(len(rows))]["input_ids"]] == cut
    assert len(data.rows("train")) == data.manifest.counts["train"].rows and len(data.tokenizer) == 300


def test_rows_of_another_preparation_are_refused(arguments, documents: list[str], tmp_path: Path) -> None:
    """Files of the same size are noticed too, in each split, before a training reads them."""
    form = {"packing": "wrap", "validation_tokens": 900}
    splits = ("train", "validation", "validation_more")
    folders = []
    for name in ("one", "two"):
        texts = documents if name == "one" else documents[60:] + documents[:60]
        files = [write_jsonl(tmp_path / f"{name}.jsonl", texts)]
        more = write_jsonl(tmp_path / f"more_{name}.jsonl", [texts[1]])
        args = arguments(name, **form, data_files=files, validation_sets=[f"more={more}"])
        folders.append(prepare(args).path)
    data = PreparedData.read(folders[0])
    data.check()
    for split in splits:
        own, other = (folder / split for folder in folders)
        kept = own.rename(tmp_path / f"kept_{split}")
        for replacement in (other, None):
            if replacement is not None:
                shutil.copytree(replacement, own)
                size = (kept / "data-00000.arrow").stat().st_size
                os.truncate(own / "data-00000.arrow", size)
            with pytest.raises(UserError, match=f"{own}.*--overwrite"):
                data.rows(split)
            shutil.rmtree(own, ignore_errors=True)
        kept.rename(own)
        assert len(data.rows(split)) == data.manifest.counts[split].rows


def test_files_that_are_missing_short_new_or_changed_are_named(arguments) -> None:
    args = arguments()
    data = prepare(args)
    path = Path(args.dataset_dir, "train", "data-00000.arrow")
    content = path.read_bytes()
    for changed, there in ((path, content[:-1]), (path.with_name("data-00001.arrow"), b""), (path, None)):
        changed.unlink() if there is None else changed.write_bytes(there)
        with pytest.raises(UserError, match=str(changed)):
            data.rows("train")
        changed.unlink(missing_ok=True)
        path.write_bytes(content)
    assert len(data.rows("train")) == data.manifest.counts["train"].rows
    data.verify()
    for changed in (path, Path(args.dataset_dir, "tokenizer", "tokenizer.json")):
        content = changed.read_bytes()
        changed.write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
        with pytest.raises(UserError, match=changed.name):
            data.verify()
        changed.write_bytes(content)
