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

from gpt2_repro.model_size import flops_per_token, gpt2_parameters
from tests.commands import ROOT
from tests.model.trace_on_cuda import STUB_SOURCE


LENGTH, WIDTH, LAYERS = 1024, 768, 12


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile the library that lets torch's CPU wheel trace CUDA tensors."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    folder, torch_folder = tmp_path_factory.mktemp("stub"), Path(torch.__file__).parent
    (folder / "stub.cpp").write_text(STUB_SOURCE)
    libraries = [f"-L{torch_folder / 'lib'}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch_folder / 'lib'}"]
    command = ["g++", "-std=c++20", "-shared", "-fPIC", f"-I{torch_folder / 'include'}", "stub.cpp", *libraries]
    subprocess.run([*command, "-o", "stub.so"], cwd=folder, check=True)
    return folder / "stub.so"


@functools.cache
def trace(stub: Path, recipe: str, rows: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.model.trace_on_cuda", stub, ROOT / "recipes" / recipe, rows]
    done = subprocess.run([str(word) for word in command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


SLOW = [pytest.param(f"{name}_124m.yaml", marks=pytest.mark.slow) for name in ("llama", "moe")]


@pytest.mark.parametrize("recipe", ["gpt2_124m.yaml", *SLOW])
def test_one_graph_per_direction_without_a_host_sync(stub: Path, recipe: str) -> None:
    forward, backward = trace(stub, recipe, 4)["operations"]
    for operations in (forward, backward):
        assert not any(word in name for name in operations for word in ("_local_scalar_dense", "nonzero"))
    assert "aten._scaled_dot_product_flash_attention.default" in forward
    assert "aten._scaled_dot_product_flash_attention_backward.default" in backward


def test_saved_bytes_and_flops_of_gpt2(stub: Path) -> None:
    few, many = trace(stub, "gpt2_124m.yaml", 4), trace(stub, "gpt2_124m.yaml", 8)
    # The gradient of the head and the position embeddings of a row do not grow with the number of rows.
    per_token = (many["saved"] - few["saved"]) / (4 * LENGTH)
    assert per_token / 1024 == pytest.approx(310, abs=2)
    assert few["saved"] - per_token * 4 * LENGTH == pytest.approx((50_304 + LENGTH) * WIDTH * 2, rel=0.001)

    shape = {"n_layer": LAYERS, "n_embd": WIDTH}
    parameters = gpt2_parameters(**shape, n_positions=LENGTH, vocab_size=50_304) - LENGTH * WIDTH
    expected = flops_per_token(parameters=parameters, **shape, sequence_length=LENGTH) - 12 * LAYERS * WIDTH * LENGTH
    products = few["flops"]["mm"] + few["flops"]["addmm"]
    assert products / (4 * LENGTH) == pytest.approx(expected, rel=0.002)  # without biases and norms
