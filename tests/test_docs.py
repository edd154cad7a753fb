"""README, CONTRIBUTING and docs/ name options, files and tests that exist."""

import contextlib
import functools
import importlib
import io
import itertools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpt2_repro.data.sources.opening import SOURCE_NAMES
from gpt2_repro.planning.batch_plan import plan_run
from tests.sections import ROOT, parse_for_preparation, parse_for_training


DOCS = sorted((ROOT / "docs").glob("*.md"))
RESULTS = ROOT / "benchmarks" / "RESULTS.md"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "runpod" / "README.md", *DOCS]
ACCELERATE = {"--config_file", "--num_processes", "--num_machines", "--machine_rank", "--main_process_ip"}
ACCELERATE |= {"--main_process_port", "--deepspeed_config_file"}
DOCKER = {"--ipc", "--init", "--user"}
FOREIGN = ("mpirun ", "python dev/data/", "python data/", "torchrun ", "hf ")  # commands of other projects
INSTALLED = {"train": "train.py", "prepare": "prepare_data.py", "evaluate": "evaluate.sh"}
PROGRAM = re.compile(
    r"gpt2-repro|train\.py|prepare_data\.py|evaluate\.sh|gpt2_repro\.(?!api\b)\w+|accelerate|benchmarks/\w+\.py"
)
OUR_FILE = re.compile(r"(?<![\w./:-])(?!dev/|scripts/|runs/)(?:[a-z_]+/)+\w+\.(?:py|yaml|sh|md|ipynb)\b")
MODULES = ("diagnose", "evaluation", "export", "generate", "preflight", "report", "supervise")


def code_of(page: Path) -> Iterator[str]:
    """Yield each command in the code blocks of a page, and all inline code."""
    text = page.read_text(encoding="utf-8")
    for block in re.findall(r"^```\w*\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL):
        lines = (re.sub(r"(^|\s)#\s.*", "", line) for line in block.replace("\\\n", " ").splitlines())
        yield from (line for line in lines if line.strip())
    inline = re.findall(r"`([^`]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))
    yield from (" ".join(code.replace("\\\n", " ").split()) for code in inline)


def with_scripts(words: list[str]) -> list[str]:
    """Return a command line with scripts instead of the commands of gpt2-repro, except those with a launcher."""
    replaced: list[str] = []
    for word in words:
        if replaced[-1:] == ["gpt2-repro"] and "--config_file" not in words:
            replaced[-1] = INSTALLED.get(word, f"gpt2_repro.{word}")
        else:
            replaced.append(word)
    return replaced


def programs_in(code: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the programs of a command line, such as accelerate and train.py, with their arguments."""
    words = [] if code.startswith(FOREIGN) else with_scripts(shlex.split(code))
    starts = [number for number, word in enumerate(words) if PROGRAM.fullmatch(word)]
    for start, end in itertools.pairwise([*starts, len(words)]):
        arguments = words[start + 1 : end]
        ends = [number for number, word in enumerate(arguments) if word in ("--", "&&")]
        yield words[start], arguments[: ends[0]] if ends else arguments


@functools.cache
def help_of(program: str) -> str:
    name = program.removesuffix(".py").replace("evaluate.sh", "gpt2_repro.evaluation")
    module = importlib.import_module(name)
    module = importlib.import_module(f"{name}.__main__") if hasattr(module, "__path__") else module
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(SystemExit):
        module.main(["--help", "all"])
    return printed.getvalue()


@functools.cache
def options_of(program: str) -> set[str]:
    if program.startswith("benchmarks/"):
        return set(re.findall(r'"(--\w+)"', (ROOT / program).read_text(encoding="utf-8")))
    if program == "accelerate":
        return ACCELERATE
    if program == "gpt2-repro":  # with a launcher
        return ACCELERATE | options_of("train.py")
    return {"--help"} | set(re.findall(r"^ {2}(?:-\w(?: \w+)?, )?(--[a-z]\w*)", help_of(program), re.MULTILINE))


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the root folder, so that no test sees what lies in data/ and runs/."""
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    (tmp_path / "runs" / "gpt2_124m").mkdir(parents=True)
    (tmp_path / "runs" / "gpt2_124m" / "recipe.yaml").symlink_to(ROOT / "recipes" / "gpt2_124m.yaml")
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("page", [*PAGES, RESULTS], ids=lambda page: page.stem)
def test_commands(page: Path) -> None:
    """Options exist, and recipes parse and divide on the number of GPUs of their command."""
    every = ACCELERATE.union(
        DOCKER, *map(options_of, ("train.py", "prepare_data.py", *(f"gpt2_repro.{m}" for m in MODULES)))
    )
    for script in (ROOT / "runpod").glob("*.sh"):
        every |= set(re.findall(r"^# +(--[a-z]\w*) ", script.read_text(encoding="utf-8"), re.MULTILINE))
    for code in code_of(page):
        programs = list(programs_in(code))
        if page == RESULTS:  # old results also name options that were removed later
            programs = [program for program in programs if program[0].startswith("benchmarks/")]
        elif option := re.match(r"--[a-z]\w*(?=[ =]|$)", code):
            assert option[0] in every, code
        for program, words in programs:
            options = {option for word in words if re.fullmatch(r"--[A-Za-z]\w*", option := word.split("=")[0])}
            assert options <= options_of(program), f"{page.name}: {options - options_of(program)} in: {code}"
            if not code.startswith(("python ", "accelerate ")) or {"--help", "…"} & set(words):
                continue
            if program == "prepare_data.py":
                parse_for_preparation(*words)
            if program == "train.py":
                recipe = parse_for_training(*words)
                processes = re.search(r"--num_processes (\d+)", code)
                count = int(processes[1]) if processes else 8 if code.startswith("accelerate ") else 1
                if recipe.training.tokens_per_step:
                    plan_run(recipe.training, recipe.data, num_processes=count)


@pytest.mark.parametrize("page", [*PAGES, RESULTS], ids=lambda page: page.stem)
def test_files(page: Path) -> None:
    for code in code_of(page):
        names = [] if code.startswith(FOREIGN) else re.findall(OUR_FILE, code)
        for name in names:
            places = (ROOT / name, ROOT / "gpt2_repro" / name, ROOT / "tests" / name)
            assert "NAME" in name or any(path.exists() for path in places), f"{page.name}: {name}"
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_tables() -> None:
    """Every promise names its tests, and docs/data.md has a row for each source."""
    page = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    promises = re.findall(r"^\| (P\d+) \|.*\|([^|]*)\|$", page, re.MULTILINE)
    assert [number for number, _ in promises] == [f"P{number}" for number in range(1, 17)]
    for number, shown in promises:
        named = re.findall(r"`([\w/]+(?:\.py|/))`", shown)
        assert named and all((ROOT / "tests" / name).exists() for name in named), number
    sources = (ROOT / "docs" / "data.md").read_text(encoding="utf-8").partition("## Choose a source\n")[2]
    rows = re.findall(r"^\| `([\w-]+)(?::LANGUAGE)?`", sources.partition("\n## ")[0], re.MULTILINE)
    assert rows == list(SOURCE_NAMES)


def test_pip_is_run_in_an_environment() -> None:
    """Debian's and Ubuntu's Python refuse pip outside of a virtual environment."""
    pages = [page for page in PAGES if "\npip install -r requirements.txt" in page.read_text(encoding="utf-8")]
    assert ROOT / "README.md" in pages
    for page in pages:
        lines = page.read_text(encoding="utf-8").splitlines()
        installs = [number for number, line in enumerate(lines) if line.startswith("pip install -r requirements.txt")]
        for number in installs:
            assert re.search(r"-m venv .*/bin/activate", lines[number - 1]), page.name
