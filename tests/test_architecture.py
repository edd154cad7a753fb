"""Modules import only from lower layers and not in circles, and functions are short."""

import ast
import graphlib
import re
from pathlib import Path

import pytest

import gpt2_repro


PACKAGE = Path(gpt2_repro.__file__).parent
ROOT = PACKAGE.parent
# Files of the repository that are not in the package.
SCRIPTS = [ROOT / "train.py", ROOT / "prepare_data.py"]
# Modules of layer 3 besides the scripts and every __main__.py. Modules that are in no other layer are in layer 0.
ENTRY_POINTS = {"api", "diagnose", "export", "generate", "prepare", "supervise", "train"}
SUBPACKAGES = {"checkpoints", "data", "model", "optim", "evaluation", "planning", "report", "preflight", "recipe"}
# The imports within layer 1.
BESIDE = {
    "model": ("checkpoints",),
    "evaluation": ("data", "model", "checkpoints", "recipe"),
    "recipe": ("data", "model", "optim"),  # for its sections
    "planning": ("data", "model", "recipe"),
    "preflight": ("planning", "recipe"),
    "report": ("evaluation", "model", "checkpoints", "planning", "recipe"),
}
PURE = [
    *("errors", "tokens", "manifest", "text", "model/size", "data/packing", "data/preparation/splits"),
    *("data/sources/presets", "evaluation/comparison", "evaluation/references", "evaluation/model_card"),
    *("evaluation/scores", "run_record/time_breakdown", "model/checkpoint", "run_record/environment"),
    *("evaluation/reading", "planning/batch_plan", "planning/cost", "planning/memory", "planning/compute_optimal"),
]
PATCHED = ("transformers", "accelerate", "deepspeed", "torch")
# The files that replace functions or attributes of these packages.
PATCHING = {"model/pretraining.py", "training/engine.py", "training/tracking.py", "training/trainer.py"}
ADDED = {"summed_loss"}  # functions that this package adds to a model
# The name of a file of a run directory, in a string or at the end of a path.
RUN_FILE = re.compile(r"""["'/]((run_status|environment)\.json|(metrics|samples)\.jsonl|recipe\.yaml|checkpoint-{)""")


def files() -> list[Path]:
    return [*SCRIPTS, *sorted(PACKAGE.rglob("*.py"))]


def layer_of(module: str) -> int:
    """Return the layer of a module such as `gpt2_repro.data.rows`: 0 (lowest) to 3."""
    parts = module.split(".")
    room = parts[1] if len(parts) > 1 else ""
    if parts[0] != "gpt2_repro" or room in ENTRY_POINTS or parts[-1] == "__main__":
        return 3
    return 2 if room == "training" else 1 if room in SUBPACKAGES else 0


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


class WithoutTyping(ast.NodeTransformer):
    """Remove the blocks `if TYPE_CHECKING:`."""

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        return node.orelse if ast.unparse(node.test).endswith("TYPE_CHECKING") else self.generic_visit(node)


def imports(path: Path, *, typing: bool = True) -> list[str]:
    """Return all names that a file imports, for example `gpt2_repro.hardware`. `typing`: also those of types only."""
    found: list[str] = []
    for node in ast.walk(tree_of(path) if typing else WithoutTyping().visit(tree_of(path))):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.module and not node.level, f"{path.relative_to(ROOT)} has a relative import"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


@pytest.mark.parametrize("path", files(), ids=module_of)
def test_imports_go_to_lower_layers(path: Path) -> None:
    module, layer = module_of(path), layer_of(module_of(path))
    for name in imports(path):
        same = name.split(".")[:2] == module.split(".")[:2]  # a module of the same subpackage
        if name.startswith("gpt2_repro.") and not same:
            room, other = (module + ".").split(".")[1], name.split(".")[1]
            lower = layer_of(name) < layer or layer_of(name) == layer in (0, 3) or other in BESIDE.get(room, ())
            assert lower, f"{module} imports {name}"


def test_no_modules_import_each_other_in_a_circle() -> None:
    modules = {module_of(path): path for path in files()}
    graph = {}
    for module, path in modules.items():
        names = imports(path, typing=False)
        graph[module] = {name if name in modules else name.rpartition(".")[0] for name in names} - {module}
    graphlib.TopologicalSorter(graph).prepare()  # CycleError names the modules


def test_names_of_run_files_are_known_to_run_record_only() -> None:
    for path in [*files(), *PACKAGE.rglob("*.j2")]:
        found = path.parent.name != "run_record" and RUN_FILE.search(path.read_text(encoding="utf-8"))
        assert not found, f"{path.relative_to(ROOT)} has {found}: use gpt2_repro.run_record.layout"


def importers(library: str) -> set[str]:
    found = {path: [name for name in imports(path) if f"{name}.".startswith(f"{library}.")] for path in files()}
    return {str(path.relative_to(ROOT)) for path, names in found.items() if names}


def test_upstream_libraries_stay_in_their_rooms() -> None:
    assert importers("flash_attn") == importers("wandb") == set()
    assert importers("deepspeed") == {"gpt2_repro/training/engine.py"}
    assert importers("gguf") == {"gpt2_repro/model/gguf_file.py"}
    assert all(path.startswith("gpt2_repro/evaluation/") for path in importers("lm_eval"))
    assert all(path.startswith("gpt2_repro/report/") for path in importers("matplotlib"))
    assert all(path.startswith("gpt2_repro/training/") for path in importers("transformers.Trainer"))
    # checkpoints/ takes plain values.
    for library in ("accelerate", "transformers"):
        assert not any(path.startswith("gpt2_repro/checkpoints/") for path in importers(library))


def imported_names(tree: ast.Module) -> dict[str, str]:
    """Return the package of each name that a module or one of its functions imports."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                package = alias.name.partition(".")[0]
                names[alias.asname or package] = package
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                names[alias.asname or alias.name] = str(node.module).partition(".")[0]
    return names


def root_of(target: ast.expr) -> str:
    """Return the first name of an expression such as `PartialState()._shared_state["key"]`."""
    while not isinstance(target, ast.Name):
        target = target.func if isinstance(target, ast.Call) else target.value  # type: ignore[attr-defined]
    return target.id


def is_function(value: ast.expr, functions: set[str]) -> bool:
    """Return whether a value is written as a function: a lambda, a method, a partial, or the name of a function."""
    called = ast.unparse(value.func) if isinstance(value, ast.Call) else ""
    return (
        isinstance(value, ast.Lambda) or called.endswith(("MethodType", "partial")) or ast.unparse(value) in functions
    )


def is_patch(target: ast.expr, value: ast.expr, packages: dict[str, str], functions: set[str]) -> bool:
    """Return whether an assignment replaces a function of an object, or any attribute of a module in PATCHED.

    The settings in torch's modules named `config`, and in `torch.backends`, are not counted.
    """
    text = ast.unparse(target)
    root = root_of(target)
    if ".config." in text or text.startswith("torch.backends."):
        return False
    if root in packages:
        return packages[root] in PATCHED
    is_own = (root == "self" and text.count(".") == 1) or text.rpartition(".")[2] in ADDED
    return isinstance(target, ast.Attribute) and not is_own and is_function(value, functions)


def patches(path: Path) -> list[str]:
    """Return the assignments of a file that replace something of another package."""
    tree = tree_of(path)
    packages = imported_names(tree)
    functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    found: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                is_part = isinstance(target, ast.Attribute | ast.Subscript)
                if is_part and is_patch(target, node.value, packages, functions):
                    found.append(ast.unparse(target))
    return found


def test_only_four_files_patch_other_packages() -> None:
    found = {str(path.relative_to(PACKAGE)): patches(path) for path in files() if path not in SCRIPTS}
    assert {name for name, targets in found.items() if targets} == PATCHING, found


@pytest.mark.parametrize("name", PURE)
def test_pure_modules_use_no_torch_network_or_environment(name: str) -> None:
    path = PACKAGE / f"{name}.py"
    imported = {name.split(".")[0] for name in imports(path)}
    assert not imported & {"torch", "transformers", "requests", "urllib", "socket", "huggingface_hub", "os"}


def test_functions_and_files_are_short() -> None:
    for path in files():
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 500, path.relative_to(ROOT)
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert (node.end_lineno or 0) - node.lineno < 80, f"{node.name} of {path.relative_to(ROOT)}"


def test_text_files_are_opened_as_utf_8() -> None:
    # ruff's PLW1514 checks `open`, but does not see the methods of a path whose type it cannot infer.
    for path in files():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                text = {"read_text": 0, "write_text": 1}.get(node.func.attr, len(node.args) + 1) == len(node.args)
                mode = ast.unparse(node.args[0]).strip("'\"") if node.args else "r"
                text |= node.func.attr == "open" and ast.unparse(node.func.value) != "os" and set(mode) <= set("rwax+")
                given = any(keyword.arg == "encoding" for keyword in node.keywords)
                assert given or not text, f'{path.relative_to(ROOT)}:{node.lineno} needs encoding="utf-8"'
