"""The documentation names existing options, files and tests, and correct defaults."""

import ast
import contextlib
import functools
import importlib
import io
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").glob("*.md"))
ACCELERATE = {"--config_file", "--num_processes", "--num_machines", "--machine_rank", "--main_process_ip"}
ACCELERATE |= {"--main_process_port"}
# Commands of other projects.
FOREIGN = ("mpirun ", "python dev/data/", "python data/", "torchrun ", "hf ")


@functools.cache
def output_of(command: str, *argv: str) -> str:
    """Run `train.py`, `prepare_data.py` or a `python -m` module; return its output."""
    name = command.removesuffix(".py")
    module = importlib.import_module(name)
    if hasattr(module, "__path__"):
        module = importlib.import_module(f"{name}.__main__")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        module.main(list(argv))
    return printed.getvalue()


@functools.cache
def options_of(command: str) -> frozenset[str]:
    found = re.findall(
        r"^ {2}(?:-\w(?: \w+)?, )?(--[a-z]\w*)", output_of(command, "--help", "all"), flags=re.MULTILINE
    )
    assert found, command
    return frozenset(found) | {"--help"}


@functools.cache
def defaults(command: str) -> dict[str, str]:
    """Return the default of each option, as printed by the --help of a command."""
    shown = {}
    for entry in re.split(r"\n(?=  --)", output_of(command, "--help", "all")):
        text = re.sub(r"-\s*\n\s+", "-", entry)  # argparse breaks words at hyphens
        if (option := re.match(r" *(--\w+)", text)) and (value := re.search(r"\(default:\s+(\S+)\)", text)):
            shown[option[1]] = value[1]
    return shown


def code_of(page: Path) -> Iterator[str]:
    """Yield each command in the code blocks of a page, and all inline code."""
    text = page.read_text(encoding="utf-8")
    for block in re.findall(r"^```\w*\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL):
        lines = (re.sub(r"(^|\s)#\s.*", "", line) for line in block.replace("\\\n", " ").splitlines())
        yield from (line for line in lines if line.strip())
    yield from re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))


def allowed_in(code: str) -> list[tuple[str, set[str]]]:
    """Split a command line into commands, and return each with its valid options.

    `code` may also be a single option; then the options of all commands are valid.
    """
    if code.startswith(FOREIGN):
        return []
    if benchmark := re.match(r"(?:python )?(benchmarks/\w+\.py)", code):
        return [(code, set(re.findall(r'"(--\w+)"', (ROOT / benchmark[1]).read_text(encoding="utf-8"))))]
    if code.startswith("python -m gpt2_repro.supervise "):
        own, _, command = code.partition(" -- ")
        return [(own, set(options_of("gpt2_repro.supervise"))), *allowed_in(command)]
    if code.startswith("accelerate launch ") and (story := re.search(r"\btrain\.py\b", code)):
        return [(code[: story.start()], ACCELERATE), (code[story.start() :], set(options_of("train.py")))]
    if named := re.match(r"python (?:-m )?(train\.py|prepare_data\.py|gpt2_repro[.\w]*)", code):
        return [(code, set(options_of(named[1])))]
    if code.startswith("bash evaluate.sh"):
        return [(code, set(options_of("gpt2_repro.evaluation")))]
    modules = ("diagnose", "evaluation", "export", "generate", "preflight", "report", "supervise")
    commands = ("train.py", "prepare_data.py", *(f"gpt2_repro.{module}" for module in modules))
    return [(code, ACCELERATE.union(*(options_of(command) for command in commands)))]


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md"], ids=lambda page: page.stem)
def test_every_option_exists_in_the_command_it_is_shown_with(page: Path) -> None:
    seen = 0
    for code in code_of(page):
        for part, allowed in allowed_in(code):
            options = [
                name for word in shlex.split(part) if re.fullmatch(r"--[A-Za-z]\w*", name := word.split("=")[0])
            ]
            unknown = set(options) - allowed
            assert not unknown, f"{page.name}: {unknown} in: {code}"
            seen += len(options)
    assert seen


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_default_in_parentheses_is_the_default(page: Path) -> None:
    before, title, after = page.read_text(encoding="utf-8").partition("## Every key of sample.py")
    sampling, _, rest = after.partition("\n## ")
    for command, text in (("train.py", before + rest), ("gpt2_repro.generate", title + sampling)):
        for option, value in re.findall(r"`(--\w+)` \((\w[\w.+-]*)\)", text):
            shown = defaults(command).get(option, "none")
            assert value == shown or float(value) == float(shown), f"{page.name}: {option} is {shown}, not {value}"


SHOWN = [code.partition(" train.py") for page in PAGES for code in code_of(page) if code.startswith("accelerate ")]


@pytest.mark.parametrize(
    "options",
    [words for launcher, story, words in SHOWN if story and "--use_cpu" not in words],
)
def test_every_training_that_is_shown_is_one_for_8_gpus(options: str) -> None:
    words = shlex.split(options)
    recipe = ["recipes/gpt2_124m.yaml"] if not words or words[0].startswith("-") else [words.pop(0)]
    printed = output_of("train.py", str(ROOT / recipe[0]), *words, "--dry_run")
    a_pass = r"(\d+ rows|at most [\d,]+ positions)"
    assert re.search(rf"on 8 GPUs +{a_pass} x 8 GPUs x \d+ accumulation steps", printed), printed


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda page: page.stem)
def test_every_file_that_a_page_names_is_there(page: Path) -> None:
    ours = re.compile(r"\b(?:recipes|accelerate_configs|ds_configs|gpt2_repro|tests)/[\w./-]*\w")
    for code in code_of(page):
        for name in ours.findall(code):
            assert (ROOT / name).exists(), f"{page.name}: {name}"
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_every_promise_names_tests_that_are_there() -> None:
    page = (
        (ROOT / "docs" / "reliability.md")
        .read_text(encoding="utf-8")
        .partition("## Promises\n")[2]
        .partition("\n## ")[0]
    )
    promises = [line.split("|")[1:-1] for line in page.splitlines() if line.startswith("| P")]
    assert [row[0].strip() for row in promises] == [f"P{number}" for number in range(1, 16)]
    for *_, shown in promises:
        named = re.findall(r"`([\w/]+(?:\.py|/))`", shown)
        assert named and all((ROOT / "tests" / name).exists() for name in named), shown


def test_the_how_to_names_files_and_identifiers_that_exist() -> None:
    section = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## How to\n")[2].partition("\n## ")[0]
    paths = re.findall(r"\b((?:\w+/)+\w+\.(?:py|md|yaml))\b", section.replace("accelerate_configs/NAME.yaml", ""))
    assert len(paths) >= 15
    assert all((ROOT / path).exists() or (ROOT / "gpt2_repro" / path).exists() for path in paths), paths
    source = "".join(
        path.read_text(encoding="utf-8") for name in ("gpt2_repro", "tests") for path in (ROOT / name).rglob("*.py")
    )
    for name in re.findall(r"`([A-Za-z_]+)(?:\(\))?`", section):
        assert re.search(rf"\b{name}(\(| = |: )", source), name


TEXTS = [*PAGES, *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "runpod/README.md"))]


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: page.parent.name + "/" + page.stem)
def test_lines_and_paragraphs_are_short(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for line in text.splitlines():
        shown = re.sub(r"\]\([^)]*\)|https?://\S+", "]", line)
        assert line.startswith("|") or len(shown) <= 119, f"{page.name}: {line}"
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*(?:[-|#]|\d+\.) )", prose):
        assert paragraph.count("\n", 0, len(paragraph.rstrip())) < 6 or paragraph.startswith("|"), paragraph


def test_the_readme_is_short_and_lists_every_page() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(readme.splitlines()) <= 150
    listed = set(re.findall(r"\]\(docs/([\w-]+)\.md\)", readme.partition("## Documentation\n")[2]))
    assert listed == {page.stem for page in PAGES}
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", readme):
        assert (ROOT / target).exists(), target
    assert all(path.stat().st_size < 60_000 for path in (ROOT / "docs" / "figures").iterdir())


@pytest.mark.parametrize("folder", ["gpt2_repro", "tests", "benchmarks", "dev"])
def test_the_first_line_of_a_docstring_is_a_short_sentence(folder: str) -> None:
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                first = (ast.get_docstring(node) or "").partition("\n")[0]
                assert len(first) <= 80 and first[-1:] in ("", ".", "?"), f"{path}: {first}"
