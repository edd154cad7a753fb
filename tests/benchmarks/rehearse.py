"""Run benchmarks/gpu.py with fake programs instead of train.py and prepare_data.py, which take milliseconds.

Environment variables:
    REHEARSAL: a folder. Its file `calls` lists the fake trainings.
    HANGS, OUT_OF_MEMORY: a word of the command of a training that hangs, or that ends with torch's error.
"""

import json
import os
import sys
import time
from pathlib import Path


ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
OUT_OF_MEMORY = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 6.14 GiB."


def fake_training(words: list[str]) -> None:
    """Write the files of a run that gpu.py reads."""
    command = " ".join(words)
    folder = Path(os.environ["REHEARSAL"])
    with (folder / "calls").open("a", encoding="utf-8") as file:
        file.write(command + "\n")
    if os.environ.get("HANGS", "nothing") in command:
        time.sleep(60)
    if os.environ.get("OUT_OF_MEMORY", "nothing") in command:
        sys.exit(f"Traceback (most recent call last):\n{OUT_OF_MEMORY}")
    run = Path(words[words.index("--output_dir") + 1])
    rows = 8
    if "--per_device_train_batch_size" in words:
        rows = int(words[words.index("--per_device_train_batch_size") + 1])
    steps = int(words[words.index("--max_steps") + 1])
    run.mkdir(parents=True, exist_ok=True)
    (run / "recipe.yaml").write_text((ROOT / "recipes" / "gpt2_124m.yaml").read_text(encoding="utf-8"))
    plan = {
        "tokens_per_step": 524288,
        "sequence_length": 1024,
        "micro_batch_size": rows,
        "num_processes": 1,
        "gradient_accumulation_steps": 512 // rows,
        "max_steps": steps,
    }
    accelerator = {"kind": "cuda", "name": "fake", "count": 1, "peak_flops": None, "memory_bytes": 150 * 10**9}
    environment = {"attention": "causal_cudnn", "plan": plan, "accelerator": accelerator}
    (run / "environment.json").write_text(json.dumps(environment), encoding="utf-8")
    with (run / "metrics.jsonl").open("w", encoding="utf-8") as file:
        for step in range(1, steps + 1):
            event = {"step": step, "loss": 9.0, "tokens_per_second": 500_000 + step, "data_wait": 0.0}
            file.write(json.dumps(event) + "\n")
    # The last step is logged. gpu.py does not wait for final/, and ends this process.
    time.sleep(60)


def rehearse(words: list[str]) -> None:
    """Run gpu.py with the fake training."""
    from benchmarks import gpu, gpu_results

    original = gpu.Bench.command

    def command(self: gpu.Bench, variant: gpu.Variant, run: Path, steps: int, *options: str) -> list[str]:
        real = original(self, variant, run, steps, *options)
        return [sys.executable, str(Path(__file__)), "fake-training", *real]

    gpu.Bench.command = command  # type: ignore[method-assign]
    gpu.KERNELS = str(Path(__file__).with_name("rehearse_kernels.py"))
    gpu_results.ARCHIVE_SECONDS = 0.05
    gpu.FIRST_SECONDS = float(os.environ.get("FIRST_SECONDS", "0"))
    gpu.VARIANT_SECONDS = 3
    gpu.main(words)


if __name__ == "__main__":
    if sys.argv[1] == "fake-training":
        fake_training(sys.argv[2:])
    else:
        rehearse(sys.argv[1:])
