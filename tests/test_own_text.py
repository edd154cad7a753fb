"""Folder names, splits and sizes are derived from the files of a user."""

import json
import shlex
from pathlib import Path

import numpy as np
import pytest
import yaml

import prepare_data
from gpt2_repro import train
from gpt2_repro.data.prepared import PreparedData
from gpt2_repro.data.rows import open_rows
from gpt2_repro.data.tokenizer import Encoder, number_tokenizer
from gpt2_repro.errors import UserError
from gpt2_repro.hardware import Accelerator
from gpt2_repro.planning import sizing
from gpt2_repro.planning.batch_plan import plan_run
from gpt2_repro.planning.sizing import follow_data
from gpt2_repro.planning.workload import workload_of
from gpt2_repro.recipe import load_recipe, output_dir_of
from tests.sections import ROOT


RECIPE = str(ROOT / "recipes" / "own_text.yaml")
LINES = (f"SPEAKER {number % 7}:\nline {number} of the play, and {number * 31 % 97} more." for number in range(400))
PLAY = "\n\n".join(LINES)


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("plays").mkdir()
    Path("plays/hamlet.v1.txt").write_text(PLAY, encoding="utf-8")
    return tmp_path


@pytest.fixture
def plays(workspace: Path) -> list[str]:
    """Prepare a text, and return the words that train on it."""
    prepare_data.main([RECIPE, "--data_files", "plays", "--sequence_length", "32"])
    return [RECIPE, "--dataset_dir", "data/plays", "--sequence_length", "32"]


def test_a_recipe_that_names_only_the_folder_takes_its_settings(plays: list[str], tmp_path: Path) -> None:
    text = "data: {dataset_dir: data/plays}\nmodel: {n_layer: 1, n_head: 1, n_embd: 8}\n"
    Path("mine.yaml").write_text(
        f"{text}training: {{tokens_per_step: 64, max_steps: 20, warmup_steps: 1}}\n", encoding="utf-8"
    )
    followed = follow_data(load_recipe(["mine.yaml"]))
    assert (followed.data.sequence_length, followed.data.tokenizer) == (32, "train")
    with pytest.raises(UserError, match="--sequence_length 32"):
        PreparedData.open(load_recipe(["mine.yaml", "--sequence_length", "16"]))


def test_source_files_may_be_passed_with_data_files(workspace: Path) -> None:
    """The commands that train.py suggests have both options."""
    prepare_data.main([RECIPE, "--source", "files", "--data_files", "plays", "--sequence_length", "32"])
    assert Path("data/plays/manifest.json").is_file()
    with pytest.raises(UserError, match="--source.*--data_files"):
        prepare_data.main([RECIPE, "--source", "embedded", "--data_files", "plays", "--sequence_length", "32"])


def test_files_folders_and_globs_of_all_kinds(workspace: Path, documents: list[str]) -> None:
    objects = [{"text": text} for text in documents if text]
    Path("plays/b.json").write_text(json.dumps([*objects[:9], "text"]), encoding="utf-8")
    Path("plays/c.json").write_text("\n".join(map(json.dumps, objects[10:20])), encoding="utf-8")
    Path("plays/deeper").mkdir()
    Path("plays/deeper/d.md").write_text("text", encoding="utf-8")
    Path("plays/.hidden.txt").write_text("not this", encoding="utf-8")
    Path("plays/picture.png").write_bytes(b"nor this")
    names = [f"plays/{name}" for name in ("hamlet.v1.txt", "b.json", "c.json", "deeper")]
    for number, files in enumerate((["plays"], ["plays/**/*.*[!g]"], names)):
        words = ("--sequence_length", "16", "--dataset_dir", f"data/{number}")
        prepare_data.main([RECIPE, "--data_files", *files, *words])
        assert PreparedData.read(f"data/{number}").manifest.read.documents == 22


def test_a_folder_is_divided_by_its_file_names(workspace: Path, documents: list[str]) -> None:
    """With --split source, test files are not used. A dataset card is not text."""
    Path("set/old.staging").mkdir(parents=True)
    Path("set/README.md").write_text("A card.", encoding="utf-8")
    Path("set/old.staging/request.jsonl").write_text("not JSON", encoding="utf-8")
    for name, count in (("train", 60), ("validation", 30), ("test", 40)):
        lines = "".join(json.dumps({"text": text}) + "\n" for text in documents[:count])
        Path(f"set/{name}.jsonl").write_text(lines, encoding="utf-8")
    prepare_data.main([RECIPE, "--data_files", "set", "--split", "source", "--sequence_length", "16"])
    assert PreparedData.read("data/set").manifest.read.documents == 90


def test_one_document_is_enough(workspace: Path, capsys) -> None:
    prepare_data.main([RECIPE, "--data_files", "plays/hamlet.v1.txt", "--sequence_length", "32"])
    command = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert command[-4:] == ["--dataset_dir", "data/hamlet", "--sequence_length", "32"]

    # The validation split is the start of the text, and the training split is the rest.
    splits = [open_rows(Path("data/hamlet", split)).joined()[0].reshape(-1, 33) for split in ("validation", "train")]
    ids = Encoder(Path("data/hamlet/tokenizer"), separator="before").encode([PLAY])[0].tolist()
    validation, train = ([*rows[:, :-1].ravel().tolist(), int(rows[-1, -1])] for rows in splits)
    held_out = len(ids) // 10
    assert validation == ids[:held_out][: len(validation)] and held_out - len(validation) < 32
    assert train == ids[round(len(ids) / 10) :][: len(train)]

    words = command[[Path(word).name for word in command].index("train.py") + 1 :]
    sized = follow_data(load_recipe(words))
    assert output_dir_of(sized) == "runs/hamlet" and sized.data.data_files == ["plays/hamlet.v1.txt"]
    assert (sized.model.n_layer, sized.model.n_embd) == (4, 256)
    training = sized.training
    assert training.tokens_per_step == 8 * 32 and training.total_tokens == 200 * 8 * 32
    assert training.per_device_train_batch_size == 8
    assert workload_of(sized).steps == 200


@pytest.mark.parametrize(
    "words",
    [
        "--data_files plays/hamlet.v1.txt --tokenizer char --separator none --sequence_length 32",
        "--data_files numbers.bin --tokenizer numbers --separator none --dataset_dir data/fineweb-10bt",
        "own.yaml --sequence_length 64",
        "own.yaml --validation_tokens 2000 --num_proc 1",
    ],
)
def test_the_printed_command_trains(workspace: Path, capsys, words: str) -> None:
    """Also if the recipe scores HellaSwag, which the tokenizer cannot encode, and after any option."""
    np.random.default_rng(0).integers(0, 512, 20_000).astype(np.uint16).tofile("numbers.bin")
    Path("numbers").mkdir()
    number_tokenizer(512).save("numbers/tokenizer.json")
    recipe = yaml.safe_load((ROOT / "recipes" / "shakespeare_char_cpu.yaml").read_text(encoding="utf-8"))
    recipe["data"] |= {"source": "files", "data_files": ["plays/hamlet.v1.txt"], "split": "head"}
    recipe["training"]["hellaswag_steps"] = 100
    Path("own.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    prepare_data.main(words.split())
    command = shlex.split(capsys.readouterr().out.splitlines()[-1])
    typed = command[[Path(word).name for word in command].index("train.py") + 1 :]
    train.main([*typed, "--dry_run"])
    assert not Path("runs").exists()
    assert load_recipe(typed).training.hellaswag_steps == 0


def test_sizes_of_a_started_run_stay_on_another_machine(plays: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    first = follow_data(load_recipe(plays))
    run = Path(output_dir_of(first))
    run.mkdir(parents=True)
    gpu = Accelerator("cuda", "NVIDIA H100 80GB HBM3", 1, 989.4e12, 80 * 10**9)
    monkeypatch.setattr(sizing, "find_accelerator", lambda **_: gpu)
    assert follow_data(load_recipe(plays)).model.n_embd == 768
    (run / "recipe.yaml").write_text(first.to_yaml(), encoding="utf-8")
    again = follow_data(load_recipe(plays))
    assert again.model == first.model and again.training == first.training
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert follow_data(load_recipe(plays)).training == first.with_training(per_device_train_batch_size=2).training


@pytest.mark.parametrize("processes", [1, 2, 3, 5, 6, 7])
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_derived_sizes_divide_over_any_number_of_processes(plays, kind: str, processes: int, monkeypatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    memory = None if kind == "cpu" else 80 * 10**9
    monkeypatch.setattr(sizing, "find_accelerator", lambda **_: Accelerator(kind, "", 1, None, memory))
    sized = follow_data(load_recipe(plays))
    plan = plan_run(sized.training, sized.data, num_processes=processes)
    assert 5 <= plan.rows_per_step <= 16 and plan.gradient_accumulation_steps == 1
    # A run of 48 rows per step, which has started on another number of processes.
    sized = follow_data(load_recipe([*plays, "--tokens_per_step", "1536"]))
    if 48 % processes:
        with pytest.raises(UserError, match="--tokens_per_step"):
            plan_run(sized.training, sized.data, num_processes=processes)
    else:
        assert plan_run(sized.training, sized.data, num_processes=processes).micro_batch_size == 48 // processes


def test_a_derived_micro_batch_fits_and_divides(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--per_device_train_batch_size", "0", "--tokens_per_step", str(3 * 2**17)]
    for gigabytes, rows in ((80, 64), (28, 48), (16, 24), (12, 12), (4, 1)):
        gpu = Accelerator("cuda", "", 2, None, gigabytes * 10**9)
        assert follow_data(load_recipe(words), device=gpu).training.per_device_train_batch_size == rows
    monkeypatch.setattr(sizing, "total_memory", lambda: 60 * 10**9)
    sizes = []
    for local in (1, 2, 4):  # the processes of a machine share its memory
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local))
        cpu = Accelerator("cpu", "", 2, None, None)
        sizes.append(follow_data(load_recipe(words), device=cpu).training.per_device_train_batch_size)
    assert sizes == [64, 24, 8]


def test_data_smaller_than_one_step_is_refused(plays: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    rows = PreparedData.read("data/plays").manifest.counts["train"].rows
    words = [*plays, "--tokens_per_step", str(10**6)]
    for processes, options in ((1, []), (1, ["--epochs", "1"]), (3, [])):
        monkeypatch.setenv("WORLD_SIZE", str(processes))
        with pytest.raises(UserError) as error:
            follow_data(load_recipe([*words, "--per_device_train_batch_size", "8", *options]))
        assert f"--tokens_per_step {32 * (rows // (8 * processes) * 8 * processes)}" in str(error.value)
