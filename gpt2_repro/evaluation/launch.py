"""The harness by its own command line under accelerate: one process for each GPU, in data parallel."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpt2_repro.errors import RunFailed


CONFIGS = Path(__file__).parents[2] / "accelerate_configs"


def launch_command(
    model: Path,
    *,
    task: str,
    task_folder: Path | None,
    max_length: int,
    batch_size: int,
    num_processes: int,
    device: str,
    limit: int | None,
    seed: int,
    output: Path,
) -> list[str]:
    """What is typed: every setting of the launcher is in a file of this project, none is the user's default."""
    config = CONFIGS / ("ddp.yaml" if num_processes > 1 else "single_gpu.yaml")
    launcher = ["--config_file", str(config), "--num_processes", str(num_processes), "--main_process_port", "0"]
    words = [sys.executable, "-m", "accelerate.commands.launch", *launcher, "-m", "lm_eval", "run", "--model", "hf"]
    words += ["--model_args", f"pretrained={model},dtype=float32,max_length={max_length}", "--tasks", task]
    words += ["--batch_size", str(batch_size), "--seed", str(seed), "--output_path", str(output), "--log_samples"]
    words += ["--include_path", str(task_folder)] if task_folder else []
    words += ["--limit", str(limit)] if limit is not None else []
    return words if device == "cuda" else [*words, "--device", device]


def evaluate_launched(model: Path, **options: Any) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """As `harness.evaluate_model`, of the plain folder `model` and one task; options are those of `launch_command`.

    Raises RunFailed where the harness does not end well: what it has said stands above.
    """
    with tempfile.TemporaryDirectory(prefix="lm_eval-") as output:
        words = launch_command(model, output=Path(output), **options)
        environment = os.environ | {"TOKENIZERS_PARALLELISM": "false", "LMEVAL_LOG_LEVEL": "ERROR"}
        code = subprocess.run(words, env=environment, stdout=sys.stderr, check=False).returncode
        found = sorted(Path(output).glob("*/results_*.json"))
        if code or not found:
            raise RunFailed(f"lm_eval ended with exit code {code} on {options['task']}: start the same command again")
        results = json.loads(found[-1].read_text())
        samples = {
            task: read_samples(found[-1].parent, task, results.get("configs", {}).get(task, {}).get("output_type"))
            for task in results["results"]
        }
    return results, samples


def read_samples(folder: Path, task: str, output_type: str | None) -> list[dict[str, Any]]:
    """The samples of a task as the harness holds them in memory; its files have numbers as text (0.4.13)."""
    numbers = output_type == "multiple_choice" or str(output_type).startswith("loglikelihood")
    samples = []
    for path in sorted(folder.glob(f"samples_{task}_[0-9]*.jsonl"))[-1:]:
        for line in path.read_text(encoding="utf-8").split("\n"):  # text may hold other ends of lines
            if not line:
                continue
            sample = json.loads(line)
            sample["arguments"] = [tuple(arguments.values()) for arguments in sample["arguments"].values()]
            if numbers:
                sample["filtered_resps"] = [_answer(answer) for answer in sample["filtered_resps"]]
            samples.append(sample)
    return samples


def _answer(answer: str | Sequence[str]) -> Any:
    """A log-probability, or one with whether it is the model's own choice."""
    if isinstance(answer, str):
        return float(answer)
    number, *greedy = answer
    return (float(number), *(word == "True" for word in greedy))
