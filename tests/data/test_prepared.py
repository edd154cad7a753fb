"""A prepared folder opens as its manifest says, for a recipe that it fits, with as many validation rows as asked."""

import json
from pathlib import Path

import numpy as np
import pytest
from datasets import load_from_disk

from gpt2_repro.data.arguments import DataArguments
from gpt2_repro.data.manifest import form_of, open_manifest, request_of
from gpt2_repro.data.prepare import prepare
from gpt2_repro.data.prepared import open_dataset, open_split
from gpt2_repro.data.rows import verify, write_rows
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
    first = prepare(args, num_proc=1)
    path = Path(args.dataset_dir, "manifest.json")
    manifest = json.loads(path.read_text())
    assert manifest["request"].pop("min_length") == 0
    for counts in manifest["counts"].values():
        counts.pop("row_tokens")
    path.write_text(json.dumps(manifest))
    assert prepare(args, num_proc=1) == manifest
    for words in ((), ("--dataset_dir", args.dataset_dir)):
        assert open_manifest(recipe_of(tmp_path, args, *words)) == manifest
    verify(args.dataset_dir, manifest)
    assert len(open_dataset(args, manifest, eval_tokens=100)[0]) == first["counts"]["train"]["rows"]
    with pytest.raises(UserError, match="was prepared with packing concat, not wrap"):
        prepare(arguments(packing="wrap"), num_proc=1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"packing": "concat"}, "packing wrap and the recipe asks for concat: use --packing wrap"),
        ({"packing": "wrap", "min_length": 8}, "min_length 12 and the recipe asks for 8: use --min_length 12"),
    ],
)
def test_another_form_is_refused_even_for_a_typed_folder(arguments, tmp_path: Path, changes, message: str) -> None:
    prepare(arguments(packing="wrap", min_length=12), num_proc=1)
    for words in ((), ("--dataset_dir", arguments().dataset_dir)):
        with pytest.raises(UserError, match=message):
            open_manifest(recipe_of(tmp_path, arguments(**changes), *words))


@pytest.mark.parametrize("form", [{}, {"packing": "wrap", "min_length": 5}], ids=["concat", "wrap"])
def test_validation_is_the_first_rows_that_make_enough_targets(arguments, form: dict) -> None:
    args = arguments(**form)
    manifest = prepare(args, num_proc=1)
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
def test_further_sets_are_cut_where_they_have_more(arguments, form: dict) -> None:
    args = arguments(**form)
    manifest = prepare(args, num_proc=1)
    folder = Path(args.dataset_dir)
    train = open_split(args.dataset_dir, "train", manifest)
    sizes = {"one": 1, "some_more": 9}
    for name, size in sizes.items():
        ids, lengths = train.first(size).joined()
        row_length = None if form else int(lengths[0])
        written = write_rows(folder / f"validation_{name}", name, [(ids, lengths)], ids.dtype, row_length)
        manifest["counts"][f"validation_{name}"] = {"rows": size, "row_tokens": written.targets}
        manifest["sha256"][f"validation_{name}"] = written.sha256
    verify(args.dataset_dir, manifest)
    lengths = train.lengths() - 1
    for tokens in (0, 1, int(lengths[0]), int(lengths[0]) + 1, int(lengths[:4].sum())):
        _, sets, _ = open_dataset(args, manifest, eval_tokens=tokens)
        assert list(sets) == ["", "one", "some_more"]
        for name, size in sizes.items():
            enough = next(n for n in range(size + 1) if n == size or lengths[:n].sum() >= tokens)
            assert len(sets[name]) == (enough if tokens else size)
    manifest["counts"]["validation_one"]["rows"] = 2
    with pytest.raises(UserError, match="validation_one has 1 rows and its manifest says 2"):
        open_dataset(args, manifest, eval_tokens=0)


def test_another_number_of_rows_is_refused(arguments) -> None:
    args = arguments(packing="wrap")
    manifest = prepare(args, num_proc=1)
    rows = open_split(args.dataset_dir, "train", manifest)
    assert all(isinstance(row, np.ndarray) for row in rows[[0, 1]]["input_ids"])
    manifest["counts"]["train"]["rows"] += 1
    with pytest.raises(UserError, match="rows and its manifest says"):
        open_split(args.dataset_dir, "train", manifest)
