"""Other libraries still have what gpt2_repro overrides and uses of their inside.

`make upgrade-check` runs these tests with the newest transformers, accelerate and DeepSpeed.
"""

import ast
import functools
import importlib
import importlib.util
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


PACKAGE = Path(__file__).parents[1] / "gpt2_repro"
SOURCES = {path: path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))}
TREES = [ast.parse(source) for source in SOURCES.values()]
STANDARD_LIBRARY = {"_asdict", "_exit", "_fields", "_replace"}
BF16 = "deepspeed.runtime.bf16_optimizer:BF16_Optimizer"
ZERO_1 = "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer"
ZERO_3 = "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3"
# Private names, and public ones without documentation, with the classes, functions and modules that define them, as
# "module:object" or "module". A function contains the name in its code.
PLACES: dict[str, tuple[str, ...]] = {
    "_attn_implementation": ("transformers:PreTrainedConfig",),
    "_cdata": ("torch:UntypedStorage",),
    "_dynamo": ("torch._dynamo:config",),
    "_functorch": ("torch._functorch:config",),
    "_get_fsdp_state": ("torch.distributed.fsdp._fully_shard._fully_shard:FSDPModule._get_fsdp_state",),
    "_global_grad_norm": (f"{BF16}.step", f"{ZERO_1}.step", ZERO_3),
    "_hp_mapping": ("deepspeed.utils.mixed_precision_linkage:link_hp_params",),
    "_hp_optimizer_states_linked": (ZERO_1, BF16),
    "_inductor": ("torch._inductor:config",),
    "_instances": ("tqdm:tqdm",),
    "_lazy_init_hp_params_optimizer_state": (ZERO_1, BF16),
    "_log_model": ("transformers.integrations:WandbCallback",),
    "_mp_policy": ("torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState",),
    "_n_gpu": ("transformers:TrainingArguments",),
    "_shared_state": ("accelerate:PartialState",),
    "_update_hp_grad": (f"{BF16}.update_hp_grads", f"{BF16}.accumulate_hp_grads_and_remove_lp"),
    "_wandb": ("transformers.integrations:WandbCallback",),
    "_z3_optimizer": (ZERO_3,),
    "__compatible_ops__": ("deepspeed.ops",),
    "clip_grad": (ZERO_1, ZERO_3, BF16),
    "clip_tensors_by_global_norm": (f"{BF16}.step",),
    "compute_steps": ("transformers:TrainerState",),
    "ds_id": ("deepspeed.runtime.zero.partition_parameters:Init._convert_to_deepspeed_param",),
    "found_inf": ("torch.optim:Adam.step",),
    "fp32_partitioned_groups_flat": (ZERO_3,),
    "get_full_hp_param": (ZERO_3, "deepspeed.utils.mixed_precision_linkage:_init_lp_to_hp_mapping"),
    "is_invalid_grad_norm": (f"{BF16}.step",),
    "is_lomo_available": ("accelerate.optimizer:AcceleratedOptimizer.step",),
    "load_universal": ("deepspeed.runtime.constants",),
    "mask_nan_or_inf_with_val_inplace": ("deepspeed.runtime.utils:get_global_norm_of_tensors",),
    "safe_save_file": ("transformers:PreTrainedModel.save_pretrained",),
}


def source_of(module: str) -> str:
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None, f"{module} is gone"
    return Path(spec.origin).read_text(encoding="utf-8")


def defines(place: str, name: str) -> bool:
    """Return whether a class, function or module of another library defines or uses a name."""
    module_name, _, path = place.partition(":")
    if not path:
        return re.search(rf"\b{re.escape(name)}\b", source_of(module_name)) is not None
    owner = importlib.import_module(module_name)
    for part in path.split("."):
        owner = getattr(owner, part)
    if inspect.ismodule(owner):
        return name in module_name.split(".")
    if inspect.isclass(owner) and name in names_in(owner):
        return True
    if not inspect.isclass(owner) or owner.__module__.startswith("deepspeed"):
        return re.search(rf"\b{re.escape(name)}\b", inspect.getsource(owner)) is not None
    return False


def attributes(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield owner and name of each attribute that is read, also through getattr."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield ast.unparse(node.value), node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("hasattr", "getattr", "setattr"):
            owner, name, *_ = node.args
            yield ast.unparse(owner), str(getattr(name, "value", ""))


@functools.cache
def called() -> set[str]:
    """Return the attributes that the package uses, and words in its strings."""
    names = {name for tree in TREES for owner, name in attributes(tree) if owner != "super()"}
    return names | {str(node.value) for tree in TREES for node in ast.walk(tree) if isinstance(node, ast.Constant)}


def private_names() -> set[str]:
    """Return the private names of other libraries' objects and modules.

    Those of our base classes (`super()._name`) are looked up in these classes, see `problems`.
    """
    names = set()
    for tree in TREES:
        names |= {name for owner, name in attributes(tree) if owner not in ("self", "cls", "super()")}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                names |= {*(node.module or "").split("."), *(alias.name for alias in node.names)}
    return {name for name in names if re.match(r"_[a-z]", name)} - STANDARD_LIBRARY


def test_each_private_name_has_a_place() -> None:
    assert private_names() <= PLACES.keys()
    used = called() | {name for tree in TREES for _, name in attributes(tree)}
    words = {word for text in used for word in re.findall(r"\w+", text)}
    assert PLACES.keys() <= words | private_names(), "a place without a user"


@pytest.mark.parametrize("name", PLACES)
def test_upstream_still_defines(name: str) -> None:
    missing = [place for place in PLACES[name] if not defines(place, name)]
    assert not missing, f"{name} is gone from {missing}"


def test_a_common_name_is_looked_up_in_its_place() -> None:
    """`_state` and `_config` are somewhere in each library."""
    for name, places in PLACES.items():
        for place in places:
            module, _, path = place.partition(":")
            if path and not inspect.ismodule(getattr(importlib.import_module(module), path, None)):
                assert not defines(place, "_state") and not defines(place, "_config"), (name, place)


def base_of(node: ast.ClassDef, tree: ast.Module) -> type | None:
    """Return the first base class of another library, or None."""
    names = {}
    for imported in ast.walk(tree):
        if isinstance(imported, ast.ImportFrom):
            names |= {alias.asname or alias.name: f"{imported.module}.{alias.name}" for alias in imported.names}
        elif isinstance(imported, ast.Import):
            names |= {alias.name.split(".")[0]: alias.name.split(".")[0] for alias in imported.names}
    for base in map(ast.unparse, node.bases):
        first, _, rest = base.partition(".")
        *modules, name = f"{names.get(first, '')}.{rest}".strip(".").split(".")
        if modules and modules[0] in ("transformers", "accelerate", "deepspeed", "torch", "lm_eval"):
            return getattr(importlib.import_module(".".join(modules)), name)
    return None


def names_in(base: type) -> set[str]:
    """Return the attributes of a class, also those that its methods assign."""
    classes = [each for each in base.__mro__ if inspect.getmodule(each) and hasattr(each, "__dict__")]
    sources = [inspect.getsource(each) for each in classes if each.__module__ not in ("builtins", "torch._C")]
    return {*dir(base), *re.findall(r"self\.(\w+)(?:: [^=\n]+)? = ", "".join(sources))}


def problems(source: str) -> list[str]:
    """Return names in subclasses that upstream lacks or has in another form."""
    tree, found = ast.parse(source), []
    for node in ast.walk(tree):
        if not isinstance(node, ast.ClassDef) or (base := base_of(node, tree)) is None:
            continue
        known = names_in(base)
        methods = {each.name: each for each in node.body if isinstance(each, ast.FunctionDef)}
        assigned = {name.id for each in node.body if isinstance(each, ast.Assign) for name in each.targets}  # type: ignore[attr-defined]
        # Upstream calls an override. A method that only we define must be called by us.
        found += [name for name in {*methods, *assigned} - known - called() if not name.startswith("__")]
        begin = {*ast.walk(methods.get("__init__", ast.Pass()))}  # our private attributes are created here
        touched = (each for each in ast.walk(node) if isinstance(each, ast.Attribute))
        stores = [each for each in touched if isinstance(each.ctx, ast.Store)]
        own = {each.attr for each in stores if each in begin or not each.attr.startswith("_")}
        fields = {each for kind in (node, *our_bases(node)) for each in kind.body if isinstance(each, ast.AnnAssign)}
        own |= {*methods, *assigned, *(ast.unparse(each.target) for each in fields)}
        for owner, name in attributes(node):
            if (owner == "super()" and name not in known) or (owner == "self" and name not in known | own):
                found.append(name)
        overrides = {name: ours for name, ours in methods.items() if not name.startswith("__")}
        found += [name for name, ours in overrides.items() if not accepts(ours, getattr(base, name, None))]
    return found


def our_bases(node: ast.ClassDef) -> list[ast.ClassDef]:
    names = [ast.unparse(base) for base in node.bases]
    nodes = (each for tree in TREES for each in tree.body)
    return [each for each in nodes if isinstance(each, ast.ClassDef) and each.name in names]


def accepts(ours: ast.FunctionDef, theirs: Any) -> bool:
    """Return whether a method takes all parameters of the overridden method."""
    if not inspect.isfunction(theirs):
        return True
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    names = [name for name, one in inspect.signature(theirs).parameters.items() if one.kind not in kinds]
    ours_by_position = [each.arg for each in ours.args.args]
    all_accepted = ours.args.vararg or ours.args.kwarg or {*names} <= {*ours_by_position}
    return bool(all_accepted) and names[: len(ours_by_position)] == ours_by_position[: len(names)]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_subclasses_override_and_use_what_upstream_has(path: Path) -> None:
    assert problems(SOURCES[path]) == []


def test_a_name_that_upstream_lacks_is_found() -> None:
    source = SOURCES[PACKAGE / "training" / "trainer.py"]
    changes = {"def _clip_grad_norm(": "def _clip_gradient_norm("}  # an override that upstream would no longer call
    changes |= {"super()._issue_warnings_after_load(": "super()._issue_warnings(", "self._tr_loss": "self._total_loss"}
    changes |= {"def get_batch_samples(self, epoch_iterator: Any,": "def get_batch_samples(self, iterator: Any,"}
    for old, new in changes.items():
        assert old in source and problems(source.replace(old, new)), old


def test_the_classes_that_deepspeed_pickles_are_where_they_were() -> None:
    from gpt2_repro.checkpoints.resuming import DEEPSPEED_CLASSES

    for name in DEEPSPEED_CLASSES:
        module, _, kind = name.rpartition(".")
        assert re.search(rf"\bclass {kind}\b|\b{kind} = ", source_of(module)), name
