"""The GPU benchmark runs all parts on a CPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import PARTS, VARIANTS, Bench, Variant, parse
from benchmarks.processes import ROOT
from gpt2_repro.planning.workload import plan_run
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


@pytest.mark.slow
def test_all_parts_on_a_cpu(tmp_path: Path) -> None:
    (tmp_path / "nanogpt").mkdir()
    for path, form in (("llmc", LLMC), ("nanogpt/train.py", NANOGPT)):
        script = f"#!{sys.executable}\nfor step in range(1, 26):\n    print({form!r}.format(step, 900.0 + step))\n"
        (tmp_path / path).write_text(script, encoding="utf-8")
        (tmp_path / path).chmod(0o755)
    variants = ["causal_sdpa", "import_times"]
    words = ["--use_cpu", "--out", tmp_path / "out", "--llmc", tmp_path / "llmc", "--nanogpt", tmp_path / "nanogpt"]
    words += ["--rounds", "1", "--variant_steps", "9", "--parts", *PARTS, "--variants", *variants]
    subprocess.run([sys.executable, "benchmarks/gpu.py", *words], cwd=ROOT, check=True, timeout=600)
    lines = (tmp_path / "out" / "results.jsonl").read_text(encoding="utf-8").splitlines()
    results = {result["name"]: result for result in map(json.loads, lines)}
    assert not [result for result in results.values() if "error" in result]
    assert results["repeated steps"]["losses_and_norms_are_equal"] is True and len(results["saves"]["paused_s"]) == 3
    measured = {name for name, result in results.items() if result.get("tokens_per_second", 0) > 0}
    assert measured >= {"as_it_is", "llm.c", "nanoGPT", *variants}
    assert {"one_process, 1 rounds", "zero1, 1 rounds"} <= results.keys()


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks").glob("*.py")), ids=lambda path: path.stem)
def test_a_script_has_a_help_text(path: Path) -> None:
    if "ArgumentParser(" in path.read_text(encoding="utf-8"):
        words = [sys.executable, "-m", f"benchmarks.{path.stem}", "--help"]
        subprocess.run(words, cwd=ROOT, check=True, timeout=120)
