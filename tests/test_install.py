"""The functions of gpt2_repro.api do what the commands do, and the package contains all files that it needs."""

import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import gpt2_repro
import gpt2_repro.__main__ as command
from gpt2_repro import api, cli, launchers
from gpt2_repro.config import load_sections
from gpt2_repro.errors import UserError
from tests.commands import ROOT


RUN = """
import json, os, signal, sys
from gpt2_repro.api import evaluate, generate, prepare, report, train

before = dict(os.environ), [signal.getsignal(number) for number in signal.valid_signals()]
recipe, corpus, output = sys.argv[1:]
data = prepare(recipe, data_files=[corpus], dataset_dir=f"{output}/data", num_proc=1, overwrite=False)
options = {"dataset_dir": data, "output_dir": f"{output}/run", "source": None}
stopped = train(recipe, **options, stop_at_step=4)
run = train(recipe, **options)
comparison = evaluate(run, tasks=["document_perplexity"], baseline="none", limit=4, device="cpu")
texts = generate(run, "ab", num_samples=2, temperature=0.0, max_new_tokens=3)
page = report(run, check=False)
assert before == (dict(os.environ), [signal.getsignal(number) for number in signal.valid_signals()])
scores = [row.task for row in comparison.rows]
print(json.dumps([str(data), str(stopped), str(run), scores, texts, str(page)]))
"""


def test_the_functions_return_what_the_commands_write(tiny_recipe: Path, corpus, train, tmp_path: Path) -> None:
    """One process prepares, trains, resumes, evaluates and generates; the losses equal those of the command."""
    words = (sys.executable, "-c", RUN, tiny_recipe, corpus[0], tmp_path)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    data, stopped, run, scores, texts, page = json.loads(done.stdout.splitlines()[-1])
    assert stopped == run == str(tmp_path / "run") and Path(page) == tmp_path / "run" / "report.html"
    assert "document_perplexity" in scores and Path(page).is_file()
    assert len(texts) == 2 and texts[0] == texts[1] and texts[0].startswith("ab")
    again = train(tmp_path / "again", "--dataset_dir", data)
    states = [json.loads(Path(folder, "run_status.json").read_text(encoding="utf-8")) for folder in (run, again)]
    assert states[0]["eval_loss"] == states[1]["eval_loss"]


def test_imports_are_lazy(type_command) -> None:
    code = "import sys, gpt2_repro.api; sys.exit(bool({'torch', 'transformers', 'datasets'} & sys.modules.keys()))"
    assert type_command("python", "-c", code).returncode == 0


def test_a_wrong_keyword_is_a_user_error(tiny_recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(UserError, match="max_steps"):
        api.train(tiny_recipe, output_dir=run, max_step=3)
    with pytest.raises(UserError, match="label_smoothing_factor"):
        api.train(tiny_recipe, output_dir=run, trainer={"label_smoothing_factor": 0})
    with pytest.raises(UserError):
        api.generate(tmp_path / "missing")
    assert not run.exists()


def test_each_kind_of_value_is_one_option() -> None:
    values = {"a": 1e-4, "b": None, "c": True, "d": False, "e": ["x", Path("y")], "f": {"k": [1]}, "g": "-z"}
    assert cli.words_of(values) == [
        "--a",
        "0.0001",
        "--c",
        "--d=false",
        "--e",
        "x",
        "y",
        "--f",
        '{"k": [1]}',
        "--g=-z",
    ]


@pytest.mark.parametrize("name", ["own_text", "own_text.yaml", "recipes/own_text.yaml", "ladder/1_rope"])
def test_shipped_recipes_are_found_in_any_folder(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = ROOT / "recipes" / f"{name.removeprefix('recipes/').removesuffix('.yaml')}.yaml"
    assert load_sections(Path(name)) == yaml.safe_load(path.read_text(encoding="utf-8"))
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("data: {seed: 1}", encoding="utf-8")
    assert load_sections(Path(name)) == {"data": {"seed": 1}}
    for wrong in ("elsewhere/own_text.yaml", "own_texts"):
        with pytest.raises(UserError):
            load_sections(Path(wrong))


def test_the_package_has_every_folder_and_kind_of_file() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    setup = project["tool"]["setuptools"]
    shipped = {ROOT / "gpt2_repro": "gpt2_repro"} | {ROOT / path: name for name, path in setup["package-dir"].items()}
    files = [(folder, path) for folder in shipped for path in folder.rglob("*") if path.is_file()]
    sources = [(folder, path) for folder, path in files if path.suffix != ".pyc"]
    needed = {".".join([shipped[folder], *path.parent.relative_to(folder).parts]) for folder, path in sources}
    assert needed == set(setup["packages"])
    kinds = {pattern.removeprefix("*") for pattern in setup["package-data"]["*"]} | {".py"}
    assert {path.suffix for _, path in sources} == kinds
    assert project["project"]["scripts"] == {"gpt2-repro": "gpt2_repro.__main__:main"}


def test_one_command_starts_every_module(type_command) -> None:
    for name in command.COMMANDS:
        assert importlib.util.find_spec(f"gpt2_repro.{command.MODULES.get(name, name)}")
    done = type_command("python", "-m", "gpt2_repro", "generate", "missing_run")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert type_command("python", "-m", "gpt2_repro", "--version").stdout.strip() == gpt2_repro.__version__


def test_launch_uses_the_shipped_configs(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda path, words: started.append(words))
    command._launch(["launch", "zero1", "--num_processes", "2", "train", "demo", "--max_steps", "3"])
    words = started[0]
    assert Path(words[words.index("--config_file") + 1]).samefile(ROOT / "accelerate_configs" / "zero1.yaml")
    assert Path(words[words.index("--deepspeed_config_file") + 1]).samefile(ROOT / "ds_configs" / "zero1.json")
    assert words[-7:] == ["--num_processes", "2", "-m", "gpt2_repro.train", "demo", "--max_steps", "3"]
    for wrong in (["launch", "zero4", "train"], ["launch", "zero1"], ["launch"]):
        with pytest.raises(UserError):
            command._launch(wrong)
    assert len(started) == 1


def test_an_installed_package_names_its_own_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    options = ("--num_processes", "2")
    assert " ".join(launchers.training_command(on_gpu=False)).endswith("train.py")
    monkeypatch.setattr(launchers, "INSTALLED", True)
    assert launchers.training_command(*options, on_gpu=False) == ["gpt2-repro", "train"]
    words = launchers.training_command(*options, on_gpu=True)
    assert words == ["gpt2-repro", "launch", "zero1", *options, "train"]


def requirements_in(name: str) -> dict[str, Requirement]:
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    requirements = [Requirement(text) for line in lines if (text := line.partition("#")[0].strip())]
    return {canonicalize_name(one.name): one for one in requirements}


def test_the_lock_file_has_every_package_in_one_allowed_version() -> None:
    locked, requested = requirements_in("requirements.lock"), requirements_in("requirements.txt")
    versions = {name: str(one.specifier).removeprefix("==") for name, one in locked.items()}
    assert all(str(one.specifier).startswith("==") for one in locked.values())
    todo = [one for one in requested.values() if one.marker is None or one.marker.evaluate()]
    assert all(one.specifier.contains(versions[name], prereleases=True) for name, one in requested.items())
    for one in todo:  # the closure: `todo` grows
        name = canonicalize_name(one.name)
        assert one.specifier.contains(versions[name], prereleases=True), f"{one} but {versions[name]} is locked"
        for text in importlib.metadata.requires(name) or []:
            need = Requirement(text)
            extras = [{"extra": extra} for extra in ("", *one.extras)]
            if need.marker is None or any(need.marker.evaluate(extra) for extra in extras):
                todo += [need] if str(need) not in map(str, todo) else []


def test_the_image_is_pinned_and_keeps_no_secrets() -> None:
    lines = (ROOT / "Dockerfile").read_text(encoding="utf-8").splitlines()
    images = [line.split()[1] for line in lines if line.startswith("FROM ")]
    assert all(re.fullmatch(r"[\w./-]+:[\w.-]*\d+\.\d+\.\d+[\w.-]*", image) for image in images) and images
    assert not [line for line in lines if re.match(r"(ENV|ARG)\b.*(KEY|TOKEN|SECRET|PASSWORD)", line)]
    for line in lines:
        if line.startswith("COPY ") and not line.startswith("COPY . "):
            assert all((ROOT / name).is_file() for name in line.split()[1:-1])
    assert {"data", "runs", ".venv*"} <= set((ROOT / ".dockerignore").read_text(encoding="utf-8").split())
