"""cloud/datatrove_tokenize.py writes token files whose rows equal those of our own preparation.

Skipped without datatrove: pip install 'datatrove[io]'
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpt2_repro.data.preparation.prepare import prepare


SCRIPT = Path(__file__).parents[3] / "cloud" / "datatrove_tokenize.py"
# sbatch answers with a number, and the test runs the tasks of the job.
FAKES = {"sbatch": "echo Submitted batch job 7", "scontrol": "echo localhost"}


def test_the_script_is_a_short_example() -> None:
    source = SCRIPT.read_text(encoding="utf-8")
    compile(source, str(SCRIPT), "exec")
    assert len(source.splitlines()) <= 60


@pytest.mark.slow
@pytest.mark.parametrize("is_slurm", [False, True])
def test_rows_of_two_tasks_equal_our_own(arguments, corpus: list[Path], tmp_path: Path, is_slurm: bool) -> None:
    """The corpus has two files, an empty document and a document that spells the separator."""
    if importlib.util.find_spec("datatrove") is None:
        pytest.skip("datatrove is not installed: pip install 'datatrove[io]'")
    ours = prepare(arguments("ours"))
    tokenizer = ours.path / "tokenizer"
    tokens = tmp_path / "tokens"
    command = [sys.executable, str(SCRIPT), str(corpus[0].parent), str(tokens), "--tasks", "2"]
    command += ["--tokenizer", str(tokenizer / "tokenizer.json")]
    environment = dict(os.environ)
    if is_slurm:
        command += ["--slurm", "cpu"]
        for name, line in FAKES.items():
            path = tmp_path / "bin" / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(f"#!/bin/bash\n{line}\n", encoding="utf-8")
            path.chmod(0o755)
        environment["PATH"] = f"{tmp_path / 'bin'}:{environment['PATH']}"
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, timeout=300)
    if is_slurm:
        job = [sys.executable, "-m", "datatrove.tools.launch_pickled_pipeline", f"{tokens}.logs/executor.pik"]
        environment |= {"SLURM_JOB_ID": "7", "SLURM_NODELIST": "localhost"}
        for task in ("0", "1"):
            environment["SLURM_ARRAY_TASK_ID"] = task
            subprocess.run(job, cwd=tmp_path, env=environment, check=True, timeout=300)
    assert len(list(tokens.glob("*.ds.index"))) == 2
    theirs = prepare(arguments("theirs", data_files=[str(tokens)], tokenizer=str(tokenizer)))
    assert theirs.manifest.sha256 == ours.manifest.sha256
