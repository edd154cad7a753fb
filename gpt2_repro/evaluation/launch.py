"""Run a task on several GPUs: one process per GPU under accelerate, in data parallel."""

import datetime
import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from gpt2_repro.errors import RunFailed
from gpt2_repro.evaluation.harness import EvaluationSettings, evaluate_model


ROOT = Path(__file__).parents[2]
ANSWER = "answer.pickle"


def launch_command(job: Path, num_processes: int) -> list[str]:
    """Return the command that starts `main`. Every launcher setting comes from this project, none from the user."""
    config = ["--config_file", str(ROOT / "accelerate_configs" / "ddp.yaml"), "--main_process_port", "0"]
    launcher = [sys.executable, "-m", "accelerate.commands.launch", *config, "--num_processes", str(num_processes)]
    return [*launcher, "-m", "gpt2_repro.evaluation.launch", str(job)]


def evaluate_launched(
    model: Path, task: str, settings: EvaluationSettings, task_folder: Path, *, num_processes: int
) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Return what `harness.evaluate_model` returns, for the plain folder `model`, from several processes.

    Raises RunFailed if they fail. They have written the reason to stderr.
    """
    with tempfile.TemporaryDirectory(prefix="lm_eval-") as scratch:
        job = Path(scratch, "job.pickle")
        job.write_bytes(pickle.dumps((str(model), task, settings, task_folder)))
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        environment = os.environ | {"PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false"}
        command = launch_command(job, num_processes)
        code = subprocess.run(command, env=environment, stdout=sys.stderr, check=False).returncode
        answer = job.with_name(ANSWER)
        if code or not answer.is_file():
            raise RunFailed(f"Scoring {task} failed with exit code {code}. Start the same command again.")
        return pickle.loads(answer.read_bytes())


def main(job: Path) -> None:
    """Score this process's share of the documents. Rank 0 writes the scores of all next to `job`."""
    import torch
    from accelerate import Accelerator, InitProcessGroupKwargs
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, task, settings, task_folder = pickle.loads(job.read_bytes())
    # Rank 0 aggregates while the others wait, longer than the default of 10 minutes for some tasks.
    accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(timeout=datetime.timedelta(days=1))])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found = evaluate_model(model, tokenizer, task, settings, task_folder, accelerator)
    if accelerator.is_main_process:
        job.with_name(ANSWER).write_bytes(pickle.dumps(found))
    accelerator.end_training()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
