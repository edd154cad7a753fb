"""`python -m gpt2_repro.preflight`: lines, exit codes, JSON, and the probe of memory with the real command."""

import json
from pathlib import Path

import pytest

from gpt2_repro.errors import UserError
from gpt2_repro.preflight import __main__ as preflight
from gpt2_repro.preflight.findings import Finding
from tests.preflight.test_topology import BLOG


@pytest.fixture
def look(capsys: pytest.CaptureFixture[str]):
    """Runs the command; returns its exit code and what it printed."""

    def run(*words: object) -> tuple[int, str]:
        with pytest.raises(SystemExit) as end:
            preflight.main([str(word) for word in words])
        return int(end.value.code or 0), capsys.readouterr().out

    return run


def test_a_machine_that_is_not_there_yet(look) -> None:
    code, out = look("--gpu", "A100 SXM", "--n", 8, "--usd_per_hour", 14)
    assert code == 0 and "✓" not in out  # no machine is looked at
    assert "18,865 steps, 9.89B tokens on 8 x A100 SXM 80 GB" in out
    assert "training steps      94.3 min  published" in out and "at $14.00 an hour (as typed)" in out
    assert "8.46e+18 FLOPs; a checkpoint 2.0 GB, final 498 MB" in out and "disk: 29.2 GB" in out
    assert "preparing the data:" in out and "on a volume that both mount" in out and "RTX 4090" in out
    assert "break-even: elsewhere is cheaper from $0.20 an hour" in out
    ranking = {line.split("h of one  ")[1][:15].strip(): line for line in out.splitlines() if "h of one" in line}
    assert ranking["L40S"].endswith("; speed estimated") and not ranking["RTX 4090"].endswith("estimated")


def test_json_has_the_same(look) -> None:
    code, out = look("--gpu", "H100 SXM", "--n", 8, "--tokens_per_second", 1.59e6, "--json")
    document = json.loads(out)
    assert code == 0 and document["findings"] == []
    assert document["machine"]["tokens_per_second"] == 1.59e6 and document["speed"] == "as typed"
    assert document["machine"]["usd_per_hour"] == pytest.approx(8 * 3.99)
    assert [entry["name"] for entry in document["budget"]][:2] == ["boot", "environment"]


def test_an_unknown_card_is_a_mistake() -> None:
    with pytest.raises(UserError, match="there is no card 'H10O SXM'.*'H100 SXM'"):
        preflight.main(["--gpu", "H10O SXM"])


def test_this_machine(look, tiny_recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpt2_repro.preflight.environment.PROBE_BYTES", 2**22)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    links = tmp_path / "topo.txt"
    links.write_text(BLOG)
    code, out = look(tiny_recipe, "--output_dir", tmp_path / "runs", "--topology", links, "--memory")
    lines = {line.split()[1]: line for line in out.splitlines() if line[:1] in "✓!✗" and line}
    assert lines["torch"].startswith("✓") and lines["links"].startswith("!")
    assert lines["memory"].startswith("✓") and lines["memory"].endswith("fits: --per_device_train_batch_size 8")
    assert "HF_TOKEN set" in out and "hf_secret" not in out
    assert code == ("✗" in out) and not (tmp_path / "runs").exists()


def test_what_is_in_the_way_is_the_exit_code(look, tiny_recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = Finding("✗", "disk", "full")
    monkeypatch.setattr(preflight, "_look", lambda *args: [Finding("✓", "torch", "2.9"), bad])
    code, out = look(tiny_recipe)
    assert code == 1 and "✗ disk             full" in out
    _, out = look(tiny_recipe, "--json")
    assert json.loads(out)["findings"][1] == {"mark": "✗", "about": "disk", "words": "full"}


def test_data_that_is_not_there_is_no_probe(look, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "_look", lambda *args: [])
    _, out = look("--memory", "--dataset_dir", "data/none")
    assert "! memory" in out and "data/none is not prepared yet" in out


def test_a_container_whose_nvidia_smi_says_nothing_is_no_mistake(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stub = tmp_path / "nvidia-smi"
    stub.write_text("#!/bin/sh\necho Failed to initialize NVML\n")
    stub.chmod(0o755)
    monkeypatch.setattr(preflight.shutil, "which", lambda name: str(stub))
    (found,) = preflight._links(None)
    assert found.mark == "!" and "does not say" in found.words
    with pytest.raises(UserError, match="no output of"):
        preflight._links(str(stub))
