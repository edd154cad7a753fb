"""A run trains without torch.compile and with torch's softmax if Triton does not work on its GPU."""

import json
import logging
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton.runtime.build
from triton.runtime.errors import PTXASError
from triton.runtime.jit import JITFunction

from gpt2_repro import hardware
from gpt2_repro.errors import UserError
from gpt2_repro.model import pretraining, softmax_kernel
from gpt2_repro.recipe import TrainingSection
from gpt2_repro.training import build as building
from gpt2_repro.training.trainer import PretrainingArguments
from tests.model.families import PADDED, VOCABULARY, build


def no_compiler() -> None:
    triton.runtime.build._find_compiler.cache_clear()
    try:
        triton.runtime.build._find_compiler("c")
    finally:
        triton.runtime.build._find_compiler.cache_clear()


def no_headers() -> None:
    raise subprocess.CalledProcessError(1, ["/usr/bin/gcc", "/tmp/cuda_utils.c", "-O3", "-shared", "-fPIC"])


def old_gpu() -> None:
    raise PTXASError("PTXAS error: Feature '.evict_first' requires .target sm_70 or higher")


def read_only_cache() -> None:
    raise PermissionError(13, "Permission denied", "/root/.triton/cache")


class FailingKernel:
    """A Triton kernel whose launch raises an error."""

    def __init__(self, fail: Callable[[], None]) -> None:
        self.fail = fail

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return lambda *args, **options: self.fail()


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a model whose softmax would be computed by the Triton kernel."""
    monkeypatch.setattr(hardware, "compiler_obstacle", lambda use_cpu: None)
    monkeypatch.setattr(pretraining, "TRITON_DEVICES", ("cpu", "cuda"))
    return build("gpt2")


def arguments(*, compiled: bool) -> Any:
    """Return arguments of a run on a GPU, whose kernels run on the CPU."""

    class Device:
        type = "cuda"

    settings = TrainingSection(torch_compile=compiled)
    args: Any = SimpleNamespace(device=Device(), bf16=False, fp16=False, settings=settings)
    args.turn_off_compile = lambda: PretrainingArguments.turn_off_compile(args)
    return args


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launch the kernel on the CPU instead of the GPU."""
    launch = pretraining.launch_softmax_kernel

    def launch_on_cpu(config: Any, device: Any, dtype: torch.dtype) -> str | None:
        assert device.type == "cuda"
        return launch(config, torch.device("cpu"), dtype)

    monkeypatch.setattr(building, "launch_softmax_kernel", launch_on_cpu)


def trains(model: Any) -> float:
    ids = torch.randint(0, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(1))
    model.zero_grad()
    loss = model(input_ids=ids[:, :-1], shift_labels=ids[:, 1:]).loss
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    return loss.item()


FAILURES = [no_compiler, no_headers, old_gpu, read_only_cache]


@pytest.mark.parametrize("requested", [None, False])
@pytest.mark.parametrize("fail", FAILURES)
def test_a_launch_that_fails(fail, requested: bool | None, tiny, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    expected = trains(tiny)
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(softmax_kernel, "cross_entropy_kernel", FailingKernel(fail))
    args = arguments(compiled=requested is None)
    with caplog.at_level(logging.WARNING):
        building.check_triton(args, tiny.config, requested=requested)
    assert len(caplog.records) == 1 and pretraining.TRITON_DEVICES == () and args.settings.torch_compile is False
    assert trains(tiny) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("fail", FAILURES)
def test_torch_compile_that_was_requested_is_refused(fail, tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(softmax_kernel, "cross_entropy_kernel", FailingKernel(fail))
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(UserError, match="--torch_compile false"):
        building.check_triton(arguments(compiled=True), tiny.config, requested=True)


def test_triton_without_a_driver(tiny, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    """The kernel is launched by Triton itself, and not by its interpreter as in other tests."""
    compiled = JITFunction(softmax_kernel.cross_entropy_kernel.fn)
    monkeypatch.setattr(softmax_kernel, "cross_entropy_kernel", compiled)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    args = arguments(compiled=True)
    building.check_triton(args, tiny.config, requested=None)
    assert len(caplog.records) == 1 and pretraining.TRITON_DEVICES == () and not args.settings.torch_compile


def test_a_missing_compiler_is_one_warning(tiny, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    """Nothing is compiled, and the kernel is not launched."""
    monkeypatch.setattr(hardware, "compiler_obstacle", lambda use_cpu: "a compiler. Install gcc or clang")
    monkeypatch.setattr(building, "launch_softmax_kernel", None)
    args = arguments(compiled=False)
    building.check_triton(args, tiny.config, requested=None)
    assert len(caplog.records) == 1 and pretraining.TRITON_DEVICES == () and not args.settings.torch_compile


def test_a_kernel_that_can_be_launched_is_used(tiny, caplog) -> None:
    args = arguments(compiled=True)
    building.check_triton(args, tiny.config, requested=None)
    assert (
        caplog.records == [] and pretraining.TRITON_DEVICES == ("cpu", "cuda") and args.settings.torch_compile is True
    )


def test_the_trial_compiles_the_kernel_of_the_run(tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch with other sizes or another dtype would not be the kernel of the first step."""
    launched = []

    class Recorded(FailingKernel):
        def __getitem__(self, grid: object) -> Callable[..., None]:
            def launch(
                logits: torch.Tensor, labels: torch.Tensor, losses: torch.Tensor, *args: Any, **sizes: Any
            ) -> None:
                losses.zero_()
                shapes = sizes["vocab_size"], sizes["padded_size"]
                launched.append((logits.dtype, labels.dtype, logits.stride(), shapes))

            return launch

    monkeypatch.setattr(softmax_kernel, "cross_entropy_kernel", Recorded(no_headers))
    args = arguments(compiled=True)
    building.check_triton(args, tiny.config, requested=None)
    trains(tiny)
    args.bf16 = True
    building.check_triton(args, tiny.config, requested=None)
    assert launched[0] == launched[1] == (torch.float32, torch.long, (PADDED, 1), (VOCABULARY, PADDED))
    assert launched[2][0] == torch.bfloat16


def test_a_run_without_triton(type_warm, tiny_recipe: Path, straight: Path, events, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = ("tests/training/gpu_train.py", tiny_recipe, "--output_dir", run)
    done = type_warm("python", *words, TRITON_FAILS="1")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert (done.stdout + done.stderr).count("Failed to find C compiler") == 1
    assert json.loads((run / "environment.json").read_text(encoding="utf-8"))["engine"]["compiled"] is False
    losses = [[event["loss"] for event in events(path) if "loss" in event] for path in (run, straight)]
    assert losses[0] == losses[1]


def test_a_run_with_torch_compile_is_refused_without_triton(type_warm, tiny_recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = ("tests/training/gpu_train.py", tiny_recipe, "--output_dir", run, "--torch_compile")
    done = type_warm("python", *words, TRITON_FAILS="1")
    assert done.returncode == 2 and "--torch_compile false" in done.stderr and "Traceback" not in done.stderr
    assert not list(run.glob("checkpoint-*")) and not (run / "metrics.jsonl").exists()
