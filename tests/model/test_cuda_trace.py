"""The compiled loss has one graph for each direction on CUDA, without host syncs.

The graphs are traced on fake CUDA tensors, so no GPU is needed.
"""

import functools
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from gpt2_repro.planning.memory import MemoryEstimate, MemoryTrial
from gpt2_repro.planning.recipe import load_recipe
from tests.commands import ROOT
from tests.model.trace_on_cuda import STUB_SOURCE


LENGTH, LAYERS = 1024, 2


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile the library that lets torch's CPU wheel trace CUDA tensors."""
    if shutil.which("g++") is None or torch.version.cuda:
        pytest.skip("needs g++ and torch's CPU wheel")
    folder, torch_folder = tmp_path_factory.mktemp("stub"), Path(torch.__file__).parent
    (folder / "stub.cpp").write_text(STUB_SOURCE, encoding="utf-8")
    libraries = [f"-L{torch_folder / 'lib'}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch_folder / 'lib'}"]
    command = ["g++", "-std=c++20", "-shared", "-fPIC", f"-I{torch_folder / 'include'}", "stub.cpp", *libraries]
    subprocess.run([*command, "-o", "stub.so"], cwd=folder, check=True)
    return folder / "stub.so"


@functools.cache
def trace(stub: Path, rows: int, *recipe: str, dtype: str = "bfloat16") -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.model.trace_on_cuda", stub, dtype, rows, ROOT / "recipes" / recipe[0]]
    done = subprocess.run([*map(str, command), *recipe[1:]], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


GPT2 = ("gpt2_124m.yaml", "--n_layer", str(LAYERS))
# The derived width of the MLP depends on the number of layers. The estimate is for the width of the recipes.
WIDTHS = {
    "4_swiglu": "intermediate_size=2048",
    "7_moe": "num_local_experts=8,num_experts_per_tok=2,intermediate_size=1024",
}
LLAMA, MIXTRAL = (
    pytest.param((f"ladder/{name}.yaml", *GPT2[1:], "--config_overrides", width), marks=pytest.mark.slow)
    for name, width in WIDTHS.items()
)


@pytest.mark.parametrize("recipe", [GPT2, LLAMA, MIXTRAL])
def test_one_graph_per_direction_without_a_host_sync(stub: Path, recipe: tuple[str, ...]) -> None:
    forward, backward = trace(stub, 4, *recipe)["operations"]
    for operations in (forward, backward):
        assert not any(word in name for name in operations for word in ("_local_scalar_dense", "nonzero"))
    assert "aten._scaled_dot_product_flash_attention.default" in forward
    assert "aten._scaled_dot_product_flash_attention_backward.default" in backward


SHAPES = [
    pytest.param(GPT2, "bfloat16", id="gpt2"),
    pytest.param(GPT2, "float32", id="gpt2, autocast", marks=pytest.mark.slow),
    pytest.param(("gpt2_124m.yaml",), "bfloat16", id="gpt2, 12 blocks", marks=pytest.mark.slow),
    pytest.param(("gpt2_1558m.yaml", *GPT2[1:]), "bfloat16", id="gpt2, width 1600", marks=pytest.mark.slow),
    pytest.param(LLAMA.values[0], "bfloat16", id="llama", marks=pytest.mark.slow),
    pytest.param(LLAMA.values[0], "float32", id="llama, autocast", marks=pytest.mark.slow),
    pytest.param(MIXTRAL.values[0], "bfloat16", id="mixtral", marks=pytest.mark.slow),
    pytest.param(MIXTRAL.values[0], "float32", id="mixtral, autocast", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("recipe", "dtype"), SHAPES)
def test_preflight_estimates_the_saved_bytes(stub: Path, recipe: tuple[str, ...], dtype: str) -> None:
    few, many = (trace(stub, rows, *recipe, dtype=dtype)["saved"] for rows in (4, 8))
    model = load_recipe([str(ROOT / "recipes" / recipe[0]), *recipe[1:]]).model
    states = {"parameters": 0, "ranks": 1, "sharded": dtype == "bfloat16", "chunk": 0, "vocab_size": 0}
    shape = {name: getattr(model, name) for name in ("model_type", "n_layer", "n_embd")}
    estimate = MemoryEstimate(**shape, **states, sequence_length=LENGTH)
    expected = estimate.bytes_of(MemoryTrial(8)) - estimate.bytes_of(MemoryTrial(4))
    assert many - few == pytest.approx(expected, rel=0.005)


def test_the_gradient_of_the_head_is_summed_without_rounding(stub: Path) -> None:
    # On a GPU of 24 GB, 8 rows are two chunks of 4,096 tokens. A rounded product would be converted to fp32.
    product = ["aten.mm.dtype", "aten.add.Tensor"]
    assert trace(stub, 8, *GPT2)["head"] == ["aten.full.default", *product, *product]
