"""A prepared folder opens as its manifest says, for a recipe that it fits, with as many validation rows as asked."""

import json
from pathlib import Path

import numpy as np
import pytest
from datasets import load_from_disk

from gpt2_repro.data.arguments import DataArguments
from gpt2_repro.data.manifest import form_of, open_manifest, request_of
from gpt2_repro.data.preparation.prepare import prepare
from gpt2_repro.data.prepared import open_dataset, open_split
from gpt2_repro.data.shards import verify
from gpt2_repro.errors import UserError
from gpt2_repro.recipe import ParsedRecipe, parse_recipe


def recipe_of(tmp_path: Path, args: DataArguments, *words: str) -> ParsedRecipe:
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps({"data": vars(args)}))  # JSON is YAML
    return parse_recipe([str(path), *words], sections={"data": DataArguments})


def test_form_and_request_are_what_was_asked(arguments) -> None:
    args = arguments(packing="wrap", min_length=7, separator="none")
    assert form_of(args) == {"packing": "wrap", "min_length": 7, "sequence_length": 32, "separator": "none"}
    assert request_of(args).items() >= form_of(args).items()
    assert (request_of(arguments())["packing"], request_of(arguments())["min_length"]) == ("concat", 0)


def test_folders_from_before_packing_wrap_still_open(arguments, tmp_path: Path) -> None:
    args = arguments()
    first = prepare(args)
    path = Path(args.dataset_dir, "manifest.json")
    manifest = json.loads(path.read_text())
    assert manifest["request"].pop("min_length") == 0
    for counts in manifest["counts"].values():
        counts.pop("row_tokens")
    for key in ("shards", "files", "read"):
        manifest.pop(key)
    path.write_text(json.dumps(manifest))
    assert prepare(args) == manifest
    for words in ((), ("--dataset_dir", args.dataset_dir)):
        assert open_manifest(recipe_of(tmp_path, args, *words)) == manifest
    with pytest.raises(UserError, match="was prepared by an older version"):
        verify(args.dataset_dir, manifest)
    assert len(open_dataset(args, manifest, eval_tokens=100)[0]) == first["counts"]["train"]["rows"]
    with pytest.raises(UserError, match="was prepared with packing concat, not wrap"):
        prepare(arguments(packing="wrap"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"packing": "concat"}, "packing wrap and the recipe asks for concat: use --packing wrap"),
        ({"packing": "wrap", "min_length": 8}, "min_length 12 and the recipe asks for 8: use --min_length 12"),
    ],
)
def test_another_form_is_refused_even_for_a_typed_folder(arguments, tmp_path: Path, changes, message: str) -> None:
    prepare(arguments(packing="wrap", min_length=12))
    for words in ((), ("--dataset_dir", arguments().dataset_dir)):
        with pytest.raises(UserError, match=message):
            open_manifest(recipe_of(tmp_path, arguments(**changes), *words))


@pytest.mark.parametrize("form", [{}, {"packing": "wrap", "min_length": 5}], ids=["concat", "wrap"])
def test_validation_is_the_first_rows_that_make_enough_targets(arguments, form: dict) -> None:
    args = arguments(**form)
    manifest = prepare(args)
    wanted = load_from_disk(f"{args.dataset_dir}/validation")["input_ids"][:]
    targets = [len(row) - 1 for row in wanted]
    assert sum(targets) == manifest["counts"]["validation"]["row_tokens"]
    assert len(open_dataset(args, manifest, eval_tokens=0)[1][""]) == len(wanted)
    for tokens in (1, targets[0], targets[0] + 1, sum(targets[:5]), sum(targets) - 1, sum(targets)):
        train, sets, tokenizer = open_dataset(args, manifest, eval_tokens=tokens)
        validation = sets.pop("")
        assert not sets
        rows = [row.tolist() for row in validation[range(len(validation))]["input_ids"]]
        assert rows == wanted[: len(rows)]
        assert sum(targets[: len(rows) - 1]) < tokens <= sum(targets[: len(rows)])
        assert len(train) == manifest["counts"]["train"]["rows"] and len(tokenizer) == 300
    with pytest.raises(
        UserError, match=f"has {sum(targets):,} tokens .* use --eval_tokens {sum(targets)} or hold out"
    ):
        open_dataset(args, manifest, eval_tokens=sum(targets) + 1)


@pytest.mark.parametrize("form", [{}, {"packing": "wrap", "min_length": 5}], ids=["concat", "wrap"])
def test_further_sets_are_cut_where_they_have_more(arguments, documents: list[str], tmp_path: Path, form) -> None:
    for name, size in (("one", 1), ("some_more", 9)):
        lines = "".join(json.dumps({"text": text}) + "\n" for text in documents[:size])
        (tmp_path / f"{name}.jsonl").write_text(lines)
    sets = [f"{name}={tmp_path / name}.jsonl" for name in ("one", "some_more")]
    args = arguments(**form, validation_sets=sets, validation_tokens=2000)
    manifest = prepare(args)
    verify(args.dataset_dir, manifest)
    for tokens in (0, 1, 32, 33, 200):
        _, opened, _ = open_dataset(args, manifest, eval_tokens=tokens)
        assert list(opened) == ["", "one", "some_more"]
        for name in ("one", "some_more"):
            split = f"validation_{name}"
            lengths = open_split(args.dataset_dir, split, manifest).lengths() - 1
            assert len(lengths) == manifest["counts"][split]["rows"]
            size = len(lengths)
            enough = next(n for n in range(size + 1) if n == size or lengths[:n].sum() >= tokens)
            assert len(opened[name]) == (enough if tokens else size)
    manifest["counts"]["validation_one"]["rows"] += 1
    with pytest.raises(UserError, match="validation_one has .* rows and its manifest says"):
        open_dataset(args, manifest, eval_tokens=0)


def test_another_number_of_rows_is_refused(arguments) -> None:
    args = arguments(packing="wrap")
    manifest = prepare(args)
    rows = open_split(args.dataset_dir, "train", manifest)
    assert all(isinstance(row, np.ndarray) for row in rows[[0, 1]]["input_ids"])
    manifest["counts"]["train"]["rows"] += 1
    with pytest.raises(UserError, match="rows and its manifest says"):
        open_split(args.dataset_dir, "train", manifest)
