"""Measure the time from a SIGKILL to the next step after a restart, or of saves.

    python benchmarks/kill_and_resume.py recipes/demo.yaml --processes 2
    python benchmarks/kill_and_resume.py recipes/demo.yaml --processes 2 --saves 4
    python benchmarks/kill_and_resume.py recipes/gpt2_124m.yaml --processes 8 -- --save_steps 50

Prepare the data of the recipe first. The run trains until it has logged a step after its first checkpoint. Then the
launcher and the workers are killed at once, and the same command is started again. With `--saves`, a run with and a run
without --background_save are compared instead. Options after `--` go to train.py.
"""

import argparse
import contextlib
import functools
import json
import re
import sys
import tempfile
from pathlib import Path


sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.processes import run_python


def first_new(run: Path, after_step: int, after_time: float) -> tuple[int, float] | None:
    """Return the first step after `after_step` that was logged after `after_time`.

    The result is the step and the Unix time of its log entry, or None.
    """
    path = run / "metrics.jsonl"
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        with contextlib.suppress(ValueError):  # the last line may be incomplete
            event = json.loads(line)
            if "loss" in event and event["step"] > after_step and event["time"] > after_time:
                return event["step"], event["time"]
    return None


def newest(run: Path) -> int:
    return max((int(path.name.split("-")[1]) for path in run.glob("checkpoint-*")), default=0)


def compare_saves(words: list[str], run: Path) -> None:
    """Print how long each save of a run takes, and how long training pauses for it."""
    for background in ("true", "false"):
        log = run.with_name(f"{background}.log")
        output = ["--output_dir", f"{run}-{background}", "--background_save", background]
        run_python([*words, *output], log=log, timeout=3600, stop=lambda: False)
        found = re.findall(
            r"([0-9.,]+) MB in ([0-9.]+) s, training paused for ([0-9.]+) s", log.read_text(encoding="utf-8")
        )
        sizes, totals, pauses = zip(*found, strict=True)
        print(f"--background_save {background}: {sizes[-1]} MB", flush=True)
        print(f"  complete after {', '.join(totals)} s\n  training paused for {', '.join(pauses)} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", help="Recipe of the run.")
    parser.add_argument("--processes", type=int, default=2, help="Training processes under ZeRO-1. (default: 2)")
    parser.add_argument("--checkpoint", type=int, default=20, help="Step of the first checkpoint. (default: 20)")
    parser.add_argument("--kills", type=int, default=3, help="Number of kills. (default: 3)")
    parser.add_argument("--saves", type=int, default=0, help="Compare runs with this number of saves; no kills.")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="Folder for temporary files.")
    cut = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    args, options = parser.parse_args(sys.argv[1:cut]), sys.argv[cut + 1 :]
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="kill-") as folder:
        run = Path(folder, "run")
        words = ["-m", "accelerate.commands.launch", "--config_file", "accelerate_configs/zero1.yaml"]
        words += ["--num_processes", str(args.processes), "--main_process_port", "0", "train.py", args.recipe]
        words += ["--save_steps", str(args.checkpoint), "--logging_steps", "1", "--disable_tqdm", "true", *options]
        if args.saves:
            return compare_saves([*words, "--max_steps", str(args.saves * args.checkpoint)], run)
        words += ["--output_dir", str(run)]
        killed = 0.0
        for number in range(args.kills + 1):
            saved, log = newest(run), Path(folder, f"{number}.log")
            new = functools.partial(first_new, run, saved or args.checkpoint, killed)
            done = run_python(words, log=log, timeout=3600, stop=lambda new=new: newest(run) > 0 and new() is not None)
            if (found := new()) is None:
                sys.exit(
                    f"The run ended before it logged a new step. End of its log:\n{log.read_text(encoding='utf-8')[-3000:]}"
                )
            step, when = found
            if killed:
                print(f"kill to step {step}: {when - killed:.1f} s, resumed from checkpoint-{saved}", flush=True)
            else:
                print(f"first start to step {step}: {when - done.began:.1f} s", flush=True)
            killed = done.ended
        files = [path for path in (run / f"checkpoint-{newest(run)}").rglob("*") if path.is_file()]
        megabytes = sum(path.stat().st_size for path in files) / 1e6
        print(f"checkpoint: {megabytes:,.1f} MB")


if __name__ == "__main__":
    main()
