"""The wheel has every file, its command works from any folder, and gpt2_repro.api does what the commands do."""

import importlib.metadata
import json
import os
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from gpt2_repro import __main__ as command
from gpt2_repro import api
from gpt2_repro.cli import words_of
from gpt2_repro.errors import UserError
from tests.commands import ENVIRONMENT, ROOT
from tests.test_requirements import requirements_in


VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
FOLDERS = ("recipes", "accelerate_configs", "ds_configs")
DATA = {"tokenizer": "train:300", "sequence_length": 32}
TINY = {"n_layer": 1, "n_head": 1, "n_embd": 16, "max_steps": 2, "warmup_steps": 1, "tokens_per_step": 256}
TINY |= {"per_device_train_batch_size": 2, "sample_tokens": 4, "eval_tokens": 512, "use_cpu": True}

# A script without `if __name__ == "__main__":`.
SCRIPT = """
import json, os, signal, sys
from gpt2_repro.api import load, prepare, train

def state():
    return sys.argv, dict(os.environ), [signal.getsignal(number) for number in signal.valid_signals()]

before = state()
recipe, folder = sys.argv[1:]
data = prepare(recipe, dataset_dir=f"{folder}/data", num_proc=2, overwrite=False)
options = {"dataset_dir": data, "output_dir": f"{folder}/run", "source": None}
stopped = train(recipe, **options, stop_at_step=4)
run = train(recipe, **options)
model, tokenizer = load(run)
assert state() == before
results = {
    "data": str(data),
    "runs": [str(stopped), str(run)],
    "vocabulary": [model.config.vocab_size, len(tokenizer)],
}
print(json.dumps(results))
"""


def files_in(folder: Path) -> dict[str, bytes]:
    """Return the contents of all files in a folder by relative path, without compiled Python."""
    contents: dict[str, bytes] = {}
    for path in folder.rglob("*"):
        if path.is_file() and path.parent.name != "__pycache__":
            contents[str(path.relative_to(folder))] = path.read_bytes()
    return contents


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install a copy of the repository, and return the folder with its package and bin/gpt2-repro."""
    source = tmp_path_factory.mktemp("source")
    target = tmp_path_factory.mktemp("installed")
    for folder in ("gpt2_repro", *FOLDERS):
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "LICENSE", "requirements.txt", "requirements-gpu.txt"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--target", str(target), str(source)], check=True)
    return target


Typed = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def type_installed(installed: Path, tmp_path: Path) -> Typed:
    """Return a function that runs a command of the installed package in an empty folder."""

    def run(*words: object, **environment: str) -> subprocess.CompletedProcess[str]:
        variables = os.environ | ENVIRONMENT | environment
        variables["PYTHONPATH"] = str(installed)
        variables["PATH"] = os.pathsep.join(
            [str(installed / "bin"), str(Path(sys.executable).parent), variables["PATH"]]
        )
        done = subprocess.run(
            list(map(str, words)), cwd=tmp_path, env=variables, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done

    return run


def printed_command(done: subprocess.CompletedProcess[str]) -> list[str]:
    """Return the words of the training command that `gpt2-repro prepare` prints last."""
    return shlex.split(done.stdout.splitlines()[-1])


def test_the_wheel_has_all_files_of_the_repository(installed: Path) -> None:
    expected = files_in(ROOT / "gpt2_repro")
    for folder in FOLDERS:
        for name, content in files_in(ROOT / folder).items():
            expected[f"{folder}/{name}"] = content
    assert files_in(installed / "gpt2_repro") == expected
    assert {path.name for path in installed.iterdir()} == {"gpt2_repro", f"gpt2_repro-{VERSION}.dist-info", "bin"}


def test_the_wheel_requires_what_the_files_require(installed: Path) -> None:
    (distribution,) = importlib.metadata.distributions(path=[str(installed)])
    always = []
    gpu = []
    for text in distribution.requires or []:
        if "extra ==" in text:
            gpu.append(Requirement(text).name)
        else:
            always.append(Requirement(text))
    assert set(map(str, always)) == set(map(str, requirements_in("requirements.txt").values()))
    assert gpu == list(requirements_in("requirements-gpu.txt"))


def test_the_installed_command_prepares_trains_and_reports(
    corpus: list[Path], type_installed: Typed, tmp_path: Path
) -> None:
    """The training command is the one that `prepare` prints. Another process would import everything again."""
    prepared = type_installed(
        "gpt2-repro", "prepare", "recipes/own_text.yaml", "--data_files", corpus[0], *words_of(DATA)
    )
    words = printed_command(prepared)
    assert words[:3] == ["gpt2-repro", "train", "recipes/own_text.yaml"]
    commands = [[*words, *words_of(TINY)], ["gpt2-repro", "report", "runs/a"]]
    type_installed(
        "python", "-c", f"import sys\nfrom gpt2_repro.__main__ import main\nfor sys.argv in {commands}: main()"
    )
    status = json.loads((tmp_path / "runs/a/run_status.json").read_text(encoding="utf-8"))
    assert status["state"] == "complete" and status["step"] == 2
    environment = json.loads((tmp_path / "runs/a/environment.json").read_text(encoding="utf-8"))
    assert environment["versions"]["gpt2-repro"] == VERSION and environment["commit"] is None
    assert (tmp_path / "runs/a/report.html").is_file()


@pytest.mark.slow
def test_the_installed_command_launches_evaluates_and_generates(
    corpus: list[Path], type_installed: Typed, tmp_path: Path
) -> None:
    """Two processes train with ZeRO-1 under the supervisor."""
    prepared = type_installed(
        "gpt2-repro", "prepare", "recipes/own_text.yaml", "--data_files", corpus[0], *words_of(DATA)
    )
    launch = ("--config_file", "zero1.yaml", "--num_processes", "2", "--main_process_port", "0")
    training = [*printed_command(prepared), *words_of(TINY), *launch]
    type_installed("gpt2-repro", "supervise", "--", *training, DS_ACCELERATOR="cpu")
    environment = json.loads((tmp_path / "runs/a/environment.json").read_text(encoding="utf-8"))
    assert environment["plan"]["num_processes"] == 2
    type_installed("gpt2-repro", "evaluate", "runs/a", "--limit", "2", "--baseline", "none", "--device", "cpu")
    assert list((tmp_path / "runs/a/evaluation").rglob("comparison.json"))
    assert "\nab" in type_installed("gpt2-repro", "generate", "runs/a", "ab").stdout
    type_installed("python", "-m", "gpt2_repro.report", "runs/a")
    assert (tmp_path / "runs/a/report.html").is_file()


def test_a_script_gets_the_results_of_the_commands(tiny_recipe: Path, train, type_warm, tmp_path: Path) -> None:
    """Also without `if __name__ == "__main__":`, and for a run that is resumed in the same process."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    done = type_warm("python", script, tiny_recipe, tmp_path / "api")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    results = json.loads(done.stdout.splitlines()[-1])
    assert results["runs"] == [str(tmp_path / "api/run")] * 2
    assert results["vocabulary"] == [300, 300]

    data = tmp_path / "data"
    done = type_warm("python", "prepare_data.py", tiny_recipe, "--dataset_dir", data, "--num_proc", 1)
    assert done.returncode == 0
    prepared = files_in(Path(results["data"]))
    expected = files_in(data)
    assert prepared.keys() == expected.keys()
    for name, content in expected.items():
        assert name == "manifest.json" or prepared[name] == content, name
    run = train(tmp_path / "run", "--dataset_dir", data)
    weights = "final/model.safetensors"
    assert (tmp_path / "api/run" / weights).read_bytes() == (run / weights).read_bytes()


@pytest.mark.slow
def test_a_script_gets_the_scores_of_the_command(train, type_warm, type_command, tmp_path: Path) -> None:
    run = train(tmp_path / "run")
    options = {"tasks": ["document_perplexity"], "baseline": "none", "limit": 4, "device": "cpu", "no_cache": True}
    script = tmp_path / "script.py"
    lines = ["from gpt2_repro.api import evaluate", f"print(evaluate({str(run)!r}, **{options}).to_json())"]
    script.write_text("\n".join(lines), encoding="utf-8")
    done = type_warm("python", script)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    output = tmp_path / "scores"
    commanded = type_command("bash", "evaluate.sh", run, *words_of(options), "--output_dir", output)
    assert commanded.returncode == 0
    expected = json.loads((output / "comparison.json").read_text(encoding="utf-8"))
    scores = json.loads(done.stdout[done.stdout.index("\n{") :])
    assert scores["rows"] == expected["rows"]


def test_the_api_raises_the_mistakes_of_the_commands(tiny_recipe: Path, tmp_path: Path) -> None:
    main_module = sys.modules["__main__"]
    with pytest.raises(UserError, match="max_step"):
        api.train(tiny_recipe, output_dir=tmp_path / "run", max_step=3)
    with pytest.raises(UserError, match=r"missing\.yaml"):
        api.prepare("missing.yaml")
    with pytest.raises(UserError):
        api.load(tmp_path / "missing")
    assert list(tmp_path.iterdir()) == []
    assert sys.modules["__main__"] is main_module


def test_importing_the_api_is_quick(type_command) -> None:
    code = "import sys, gpt2_repro.api; sys.exit(bool({'torch', 'transformers', 'datasets'} & sys.modules.keys()))"
    assert type_command("python", "-c", code).returncode == 0


def test_a_config_file_starts_accelerate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path has precedence. A shipped config gets the path of its DeepSpeed JSON, which works from any folder."""
    started: list[list[str]] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "execv", lambda path, words: started.append(words))
    training = ["-m", "gpt2_repro.train", "recipes/demo.yaml", "--max_steps", "3"]

    def launched(config: str) -> list[str]:
        command.launch(["recipes/demo.yaml", "--config_file", config, "--num_processes", "2", "--max_steps", "3"])
        return started.pop()

    for config in ("zero1.yaml", "accelerate_configs/zero1.yaml"):
        words = launched(config)
        assert words[words.index("--config_file") + 1] == str(ROOT / "accelerate_configs/zero1.yaml")
        assert words[words.index("--deepspeed_config_file") + 1] == str(ROOT / "ds_configs/zero1.json")
        assert words[-7:] == ["--num_processes", "2", *training]
    (tmp_path / "zero1.yaml").write_text("num_processes: 1", encoding="utf-8")
    words = launched("zero1.yaml")
    assert words[3:] == ["--config_file", "zero1.yaml", "--num_processes", "2", *training]


@pytest.mark.parametrize("words", [["reports"], ["train", "--config_file", "zero9.yaml"]])
def test_mistakes_of_the_command(words: list[str], type_command) -> None:
    done = type_command("python", "-m", "gpt2_repro", *words)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and words[-1] in done.stderr
    assert done.stdout == ""
