"""The GPU benchmark runs all parts on a CPU."""

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from benchmarks.gpu import PARTS, Bench, parse
from benchmarks.gpu_results import compared
from benchmarks.gpu_variants import LLMC_VARIANTS, VARIANTS, Variant, cutlass_folders, obstacle
from benchmarks.processes import ROOT, is_alive
from gpt2_repro.planning.batch_plan import plan_run
from gpt2_repro.recipe import load_recipe


LLMC = "step   {0}/25 | loss 7.123456 (+nanz)| norm 1.2345 (+0.12z)| lr 6.00e-04 | {1:.2f} ms | 54.3% bf16 MFU | 530700 tok/s"
NANOGPT = "iter {0}: loss 7.1234, time {1:.2f}ms, mfu 31.45%"


def bench(folder: Path, *words: str) -> Bench:
    args, further = parse(["--use_cpu", "--out", str(folder / "out"), *words])
    return Bench(args, further, folder)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_variants_are_valid_and_divide_a_step_of_one_gpu(variant: Variant, tmp_path: Path) -> None:
    command = bench(tmp_path).command(variant, tmp_path / "run", 25)
    script = command.index("benchmarks/patched_train.py" if variant.patch else "train.py")
    recipe = load_recipe(command[script + 1 :])
    assert plan_run(recipe.training, recipe.data, num_processes=1).max_steps == 25
    full_size = load_recipe(["recipes/gpt2_124m.yaml", *variant.options.split()])
    plan_run(full_size.training, full_size.data, num_processes=1)


def test_results_are_kept_and_a_failed_part_is_one_of_them(tmp_path: Path) -> None:
    measured = bench(tmp_path, "--minutes", "0")
    measured.record("train", "as_it_is", tokens_per_second=200, lowest=190, highest=210, peak_gb=30.1)
    measured.record("programs", "llm.c", tokens_per_second=300, lowest=290, highest=310, peak_gb=0)
    measured.attempt("paired", "failed", measured.paired)
    lines = (tmp_path / "out" / "results.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["part"] for line in lines] == ["train", "programs", "paired"]
    table = measured.tables()
    assert "| programs, llm.c | 300 (290 to 310) | 1.500 |" in table and "| paired, failed | error UserError:" in table


def test_the_fastest_llmc_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llmc = tmp_path / "llmc"
    step = LLMC.format(1, 1000.0)
    llmc.write_text(f"""#!/bin/bash
time=1000.00
case "$*" in
  *"-ge 1"*) time=950.00 ;;
  *"-ge 2"*) time=900.00 ;;
esac
for step in $(seq 12); do echo '{step}' | sed "s/1000.00/$time/"; done
echo "$*" >> {tmp_path / "calls"}
""")
    llmc.chmod(0o755)
    measured = bench(tmp_path, "--llmc", str(llmc))
    monkeypatch.setattr(measured, "write_token_files", lambda: None)
    measured.record("train", "as_it_is", tokens_per_second=8192, lowest=8000, highest=8200, peak_gb=30.1)
    measured.programs()
    assert measured.results[-1] == {
        "part": "programs",
        "name": "fastest llm.c",
        "variant": "llm.c, -ge 2",
        "speed": round(8192 / 0.9),
    }
    assert "train.py has 0.900 of the speed of the fastest llm.c (`llm.c, -ge 2`)." in measured.tables()
    calls = (tmp_path / "calls").read_text(encoding="utf-8").splitlines()
    assert [call.partition(" -x 25 ")[2] for call in calls] == list(LLMC_VARIANTS.values())


def test_modules_of_cutlass_are_found_in_a_folder_of_pythonpath(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "nvidia_cutlass_dsl" / "dsl_packages"
    (folder / "cutlass").mkdir(parents=True)
    (tmp_path / "quack").mkdir()
    quack = next(variant for variant in VARIANTS if variant.name == "quack_mlp")
    assert obstacle(quack, set()) == "cutlass is not installed"
    monkeypatch.syspath_prepend(str(tmp_path))
    assert obstacle(quack, set()) == "cutlass is not installed"
    assert cutlass_folders() == [str(folder)]
    measured = bench(tmp_path)
    assert obstacle(quack, set()) is None
    assert measured.environment["PYTHONPATH"].startswith(str(folder))


def test_hopper_waits_for_the_variants_that_it_joins(tmp_path: Path) -> None:
    hopper = next(variant for variant in VARIANTS if variant.name == "hopper")._replace(needs="")
    assert obstacle(hopper, {"quack_mlp", "quack_loss"}) == "flash_attention_4 was not measured"
    assert obstacle(hopper, {"quack_mlp", "quack_loss", "flash_attention_4"}) is None


def test_the_hub_is_not_asked_for_a_local_tokenizer(tmp_path: Path) -> None:
    assert "HF_HUB_OFFLINE" not in bench(tmp_path).environment
    assert bench(tmp_path, "--tokenizer", str(tmp_path)).environment["HF_HUB_OFFLINE"] == "1"


@pytest.mark.parametrize(("measured", "close"), [(100e9, True), (105.5e9, False), (95e9, False)])
def test_memory_within_five_percent(measured: float, close: bool) -> None:
    assert compared(measured, 100e9)["within_5_percent"] is close


def test_a_process_may_end_while_it_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    def status(self: psutil.Process) -> str:
        raise psutil.NoSuchProcess(self.pid)

    assert is_alive(psutil.Process())
    monkeypatch.setattr(psutil.Process, "status", status)
    assert not is_alive(psutil.Process())


@pytest.mark.slow
def test_all_parts_on_a_cpu(tmp_path: Path) -> None:
    (tmp_path / "nanogpt").mkdir()
    for path, form in (("llmc", LLMC), ("nanogpt/train.py", NANOGPT)):
        script = f"#!{sys.executable}\nfor step in range(1, 26):\n    print({form!r}.format(step, 900.0 + step))\n"
        (tmp_path / path).write_text(script, encoding="utf-8")
        (tmp_path / path).chmod(0o755)
    variants = ["causal_sdpa", "import_times"]
    words = ["--use_cpu", "--out", tmp_path / "out", "--llmc", tmp_path / "llmc", "--nanogpt", tmp_path / "nanogpt"]
    words += ["--rounds", "1", "--variant_steps", "9", "--variants", *variants, "--check_copies"]
    words += ["--parts", *[part for part in PARTS if part != "memory"]]  # ten trainings
    subprocess.run([sys.executable, "benchmarks/gpu.py", *words], cwd=ROOT, check=True, timeout=600)
    lines = (tmp_path / "out" / "results.jsonl").read_text(encoding="utf-8").splitlines()
    results = {result["name"]: result for result in map(json.loads, lines)}
    failed = [result for result in results.values() if "error" in result]
    assert {result["part"] for result in failed} <= {"kernels"}  # most of them need a GPU
    assert results["attention, causal_sdpa"]["ratio"] == 1
    assert results["repeated steps"]["losses_and_norms_are_equal"] is True and len(results["saves"]["paused_s"]) == 3
    assert results["copy of a checkpoint"]["tensors"] > 20 and results["copy of a checkpoint"]["differing"] == []
    measured = {name for name, result in results.items() if result.get("tokens_per_second", 0) > 0}
    assert measured >= {"as_it_is", "llm.c", "nanoGPT", *variants}
    assert {"one_process, 1 rounds", "zero1, 1 rounds"} <= results.keys()


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks").glob("*.py")), ids=lambda path: path.stem)
def test_a_script_has_a_help_text(path: Path) -> None:
    if "ArgumentParser(" in path.read_text(encoding="utf-8"):
        words = [sys.executable, "-m", f"benchmarks.{path.stem}", "--help"]
        subprocess.run(words, cwd=ROOT, check=True, timeout=120)
