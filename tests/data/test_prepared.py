"""A prepared folder opens as its manifest says, for a recipe that it fits, with as many validation rows as asked."""

import json
from pathlib import Path

import numpy as np
import pytest
from datasets import load_from_disk

from gpt2_repro.data.arguments import DataArguments
from gpt2_repro.data.manifest import open_manifest
from gpt2_repro.data.preparation.prepare import prepare
from gpt2_repro.data.prepared import open_dataset, open_split
from gpt2_repro.data.shards import verify
from gpt2_repro.errors import UserError
from gpt2_repro.recipe import parse_recipe


def open_for(tmp_path: Path, args: DataArguments, *words: str) -> dict:
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps({"data": vars(args)}))  # JSON is YAML
    recipe = parse_recipe([str(path), *words], data=DataArguments)
    return open_manifest(recipe.data, typed=recipe.typed, recipe=path)


def test_another_form_is_refused_even_for_a_typed_folder(arguments, tmp_path: Path) -> None:
    args = arguments(packing="wrap", min_length=12)
    manifest = json.loads(json.dumps(prepare(args)))
    for words in ((), ("--dataset_dir", args.dataset_dir)):
        assert open_for(tmp_path, args, *words) == manifest
        for changes, fix in [({"packing": "concat"}, "wrap"), ({"packing": "wrap", "min_length": 8}, "12")]:
            with pytest.raises(UserError, match=f"use --{list(changes)[-1]} {fix}"):
                open_for(tmp_path, arguments(**changes), *words)
    path = Path(args.dataset_dir, "manifest.json")
    manifest["request"].pop("split_seed")  # of a commit before this option: it is the default there
    path.write_text(json.dumps(manifest))
    assert open_for(tmp_path, args) == prepare(args) == manifest
    manifest.pop("shards")
    path.write_text(json.dumps(manifest))
    with pytest.raises(UserError, match="python prepare_data.py"):
        open_for(tmp_path, args)


@pytest.mark.parametrize("form", [{}, {"packing": "wrap", "min_length": 5}], ids=["concat", "wrap"])
def test_validation_is_the_first_rows_that_make_enough_targets(
    arguments, documents: list[str], tmp_path: Path, form: dict
) -> None:
    for name, size in (("one", 1), ("some_more", 9)):
        lines = "".join(json.dumps({"text": text}) + "\n" for text in documents[:size])
        (tmp_path / f"{name}.jsonl").write_text(lines)
    sets = [f"{name}={tmp_path / name}.jsonl" for name in ("one", "some_more")]
    args = arguments(**form, validation_sets=sets, validation_tokens=2000)
    manifest = prepare(args)
    splits = {"": "validation", "one": "validation_one", "some_more": "validation_some_more"}
    wanted = {name: load_from_disk(f"{args.dataset_dir}/{split}")["input_ids"][:] for name, split in splits.items()}
    main = [len(row) - 1 for row in wanted[""]]
    for tokens in (1, main[0], main[0] + 1, 200, sum(main[:5]), sum(main) - 1, sum(main), 0):
        train, opened, tokenizer = open_dataset(args, manifest, eval_tokens=tokens)
        assert len(train) == manifest["counts"]["train"]["rows"] and len(tokenizer) == 300
        assert list(opened) == list(splits)
        for name, rows in opened.items():
            before = np.cumsum([0, *(len(row) - 1 for row in wanted[name][:-1])])  # targets before each row
            cut = [row for row, start in zip(wanted[name], before, strict=True) if start < tokens or not tokens]
            assert [row.tolist() for row in rows[range(len(rows))]["input_ids"]] == cut
    with pytest.raises(UserError, match=f"--eval_tokens {sum(main)}"):
        open_dataset(args, manifest, eval_tokens=sum(main) + 1)
    manifest["counts"]["validation_one"]["rows"] += 1
    with pytest.raises(UserError, match="validation_one"):
        open_dataset(args, manifest, eval_tokens=0)


def test_files_that_are_missing_short_new_or_changed_are_named(arguments) -> None:
    args = arguments()
    manifest = prepare(args)
    path = Path(args.dataset_dir, "train", "data-00000.arrow")
    content = path.read_bytes()
    for changed, there in ((path, content[:-1]), (path.with_name("data-00001.arrow"), b""), (path, None)):
        changed.unlink() if there is None else changed.write_bytes(there)
        with pytest.raises(UserError, match=str(changed)):
            open_split(args.dataset_dir, "train", manifest)
        changed.unlink(missing_ok=True)
        path.write_bytes(content)
    assert len(open_split(args.dataset_dir, "train", manifest)) == manifest["counts"]["train"]["rows"]
    verify(args.dataset_dir, manifest)
    for changed in (path, Path(args.dataset_dir, "tokenizer", "tokenizer.json")):
        content = changed.read_bytes()
        changed.write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
        with pytest.raises(UserError, match=changed.name):
            verify(args.dataset_dir, manifest)
        changed.write_bytes(content)
