"""`python -m gpt2_repro.preflight` has the right output, errors and exit codes."""

from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from gpt2_repro import machine
from gpt2_repro.errors import UserError
from gpt2_repro.hardware import Accelerator
from gpt2_repro.preflight import __main__ as preflight
from gpt2_repro.preflight.environment import Finding
from gpt2_repro.preflight.memory import Outcome
from tests.preflight.test_links import BLOG
from tests.sections import parse_for_training


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure the CPU speed with only one forward and backward pass, to save time."""
    monkeypatch.setattr(machine, "CPU_SECONDS", 0.0)


@pytest.fixture
def look(capsys: pytest.CaptureFixture[str]):
    """Return a function that runs preflight and returns the exit code and output."""

    def run(*words: object) -> tuple[int, str]:
        with pytest.raises(SystemExit) as end:
            preflight.main([str(word) for word in words])
        return int(end.value.code or 0), capsys.readouterr().out

    return run


def test_a_machine_that_is_not_there_yet(look) -> None:
    code, out = look("--gpu", "A100 SXM", "--n", 8, "--usd_per_hour", 14)
    # With --gpu no machine is checked: the findings are only about the recipe and the name of the card.
    assert code == 0
    assert [line.split()[1] for line in out.splitlines() if line[:1] in ("✓", "!", "✗")] == ["step", "memory", "card"]
    for number in ("18,865", "9.89 B", "A100 SXM 80 GB", "113.2 min", "$14.00", "8.46e+18", "20.7 GB", "10.5 GB"):
        assert number in out, number
    code, out = look("--gpu", "TPU v9", "--tokens_per_second", 2e5, "--usd_per_hour", 1)
    assert code == 0 and "on 1 x TPU v9" in out and "at $1.00 an hour" in out
    code, out = look("--gpu", "H100 SXM", "--n", 3)
    assert code == 1 and "✗ step" in out


@pytest.mark.parametrize(
    ("words", "code", "fix"),
    [
        (["--gpu", "RTX 4090"], 1, "--per_device_train_batch_size 32"),
        (["--gpu", "RTX 4090", "--per_device_train_batch_size", "32"], 0, ""),
        (["--gpu", "RTX 4090", "--no_bf16", "--tokens_per_second", "1e5"], 1, "--per_device_train_batch_size 16"),
        (["recipes/gpt2_1558m.yaml", "--gpu", "RTX 4090"], 1, "larger GPU"),
        (["recipes/gpt2_1558m.yaml", "--gpu", "RTX 4090", "--n", "8"], 1, "--per_device_train_batch_size 2"),
        (["recipes/gpt2_1558m.yaml", "--gpu", "A100 SXM 80", "--n", "8"], 0, ""),
        ([], 1, "--per_device_train_batch_size 32"),
    ],
)
def test_a_micro_batch_that_does_not_fit(words, code, fix, look, monkeypatch: pytest.MonkeyPatch) -> None:
    here = Accelerator("cuda", "a GPU", 1, None, 24_000_000_000)
    monkeypatch.setattr("gpt2_repro.hardware.find_accelerator", lambda use_cpu: here)
    ended, out = look(*words)
    line = next(line for line in out.splitlines() if "memory  " in line and "shared" not in line)
    assert ended == code and line.startswith("✗" if code else "✓") and line.endswith(fix)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--gpu", "H10O SXM"], "H100 SXM"),
        (["--gpu", "H100", "--dist"], "--dist"),
        (["--n", "0"], "--n"),
        (["--tokens_per_second", "nan"], "nan"),
        (["--usd_per_hour", "nan"], "--usd_per_hour"),
        (["--total_tokens", "100"], "total_tokens 100"),
        (["--gpu", "H100", "--n_embd", "-1"], "--n_embd"),
        (["--use_cpu", "--topology", "pyproject.toml"], "nvidia-smi topo -m"),
        (["--gpu", "H100", "--document_mask", "--packing", "wrap"], "--document_mask"),
    ],
)
def test_a_mistake_is_named(words: list[str], named: str) -> None:
    with pytest.raises(UserError, match=named):
        preflight.main(words)


def test_this_machine(look, tiny_recipe: Path, tmp_path: Path) -> None:
    links = tmp_path / "topo.txt"
    links.write_text(BLOG, encoding="utf-8")
    code, out = look(tiny_recipe, "--output_dir", tmp_path / "runs", "--topology", links)
    lines = {line.split()[1]: line for line in out.splitlines() if line[:1] in ("✓", "!", "✗")}
    assert lines["torch"].startswith("✓") and lines["links"].startswith("!")
    assert lines["time"].startswith("✓") and "tokens/s" in lines["time"] and "memory" not in lines
    assert lines["data"].startswith("✓") and "0 MB for data" in lines["disk"]
    assert code == ("✗" in out) and not (tmp_path / "runs").exists()
    code, out = look(tiny_recipe, "--sequence_length", 16)
    assert code == 1 and "✗ data" in out and "sequence_length 32" in out


def test_the_memory_probe_uses_the_recommended_launcher(
    look, tiny_recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = Mock(side_effect=lambda command, trial, seconds: Outcome(trial, "fits"))
    monkeypatch.setattr(machine.memory, "attempt_command", attempt)
    for words in ((), ("--use_cpu", "false")):
        assert "✓ memory" in look(tiny_recipe, "--memory", *words)[1]
    for command in (attempt.call_args_list[number].args[0] for number in (0, -1)):
        assert command[command.index("--config_file") + 1].endswith("accelerate_configs/zero1.yaml")


def test_a_machine_without_a_gpu(look, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpt2_repro.hardware.nvidia_driver", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(machine, "measure_cpu", lambda recipe, work: 29.0)
    code, out = look("--dataset_dir", "data/none", "--memory")
    assert code == 1 and "✗ device" in out
    assert "! time  " in out and "years" in out and "own_text.yaml" in out
    assert "! data  " in out and "42.3 GB for data in data/none" in out and "! memory" in out


def test_precision_is_judged_as_train_py_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Preflight and train.py judge the precision by the same rules."""
    monkeypatch.setattr("gpt2_repro.hardware.nvidia_driver", lambda: "570.1")
    monkeypatch.setattr(
        "gpt2_repro.hardware.find_accelerator", lambda use_cpu: Accelerator("cuda", "Tesla T4", 1, None, 16)
    )
    for name, value in (("is_available", True), ("device_count", 1), ("get_device_name", "Tesla T4")):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    # A T4 has 16 GB and cannot multiply in bf16.
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    cases = [((), "✗", "--bf16 false"), (("--no_bf16",), "✓", "fp32"), (("--accept_any_hardware",), "✓", "fp32")]
    for options, mark, words in cases:
        recipe = parse_for_training("--torch_compile", "false", *options)
        found = {finding.about: finding for finding in machine.check_devices(recipe)}
        assert (
            found["driver"].mark == "✓" and found["attention"].mark == "✓" and "1 x Tesla T4" in found["device"].words
        )
        assert found["precision"].mark == mark and words in found["precision"].words
    flash = parse_for_training("--torch_compile", "false", "--attn_implementation", "flash_attention_2")
    refused = machine.check_devices(flash)[-1]
    assert refused.mark == "✗" and "flash_attention_2" in refused.words
    found = machine.check_sum(8)
    assert found.mark == "✗" and "--n 1" in found.words


def test_a_missing_package_is_told_before_anything_is_imported(look, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = Finding("✗", "transformers", "is not installed: pip install -r requirements.txt")
    monkeypatch.setattr(preflight.environment, "check_python", lambda path: [missing])
    code, out = look("--no_such_option")
    assert code == 1 and out.startswith("✗ transformers") and out.count("\n") == 1


def test_a_container_whose_nvidia_smi_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stub = tmp_path / "nvidia-smi"
    stub.write_text("#!/bin/sh\necho Failed to initialize NVML\n", encoding="utf-8")
    stub.chmod(0o755)
    monkeypatch.setattr(machine.shutil, "which", lambda name: str(stub))
    assert [found.mark for found in machine.check_links(None)] == ["!"]
