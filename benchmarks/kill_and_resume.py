"""Measure what a kill costs: the restart, the pauses for saves, and the goodput.

    python benchmarks/kill_and_resume.py recipes/demo.yaml --processes 2
    python benchmarks/kill_and_resume.py recipes/demo.yaml --processes 2 --saves 4
    python benchmarks/kill_and_resume.py recipes/demo.yaml --processes 2 --minutes 1.5
    python benchmarks/kill_and_resume.py recipes/gpt2_124m.yaml --processes 8 -- --save_steps 50

Prepare the data of the recipe first. The run trains under ZeRO-1 until it has logged a step after its first
checkpoint. Then the launcher and the workers are killed at once, and the same command is started again.

With --saves, a run with and a run without --background_save are compared instead.

With --minutes, a worker of a supervised run is killed at this interval, and SIGTERM ends the run. Goodput is the share
of the paid seconds in which optimizer steps ran that the run kept.

Options after `--` go to train.py.
"""

import argparse
import json
import signal
import sys
import tempfile
import time
from pathlib import Path

import psutil


sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.machine import print_columns, print_header, print_row
from benchmarks.processes import SAVED, logged, run_python
from gpt2_repro.checkpoints.rotation import newest_step


def resume(words: list[str], run: Path, args: argparse.Namespace) -> None:
    """Print the time from each kill to the next step."""
    killed = 0.0
    print_columns("event", "time")
    for number in range(args.kills + 1):
        saved, log = newest_step(run), run.with_name(f"{number}.log")
        step = max(saved, args.checkpoint) + 1

        def is_time(step: int = step, killed: float = killed) -> bool:
            return newest_step(run) > 0 and logged(run).get(step, {"time": 0.0})["time"] > killed

        done = run_python(words, log=log, timeout=3600, stop=is_time)
        if not is_time():
            sys.exit(f"The run ended before it logged step {step}:\n{log.read_text(encoding='utf-8')[-3000:]}")
        start = f"kill to step {step}, resumed from checkpoint-{saved}" if killed else f"first start to step {step}"
        print_row(start, f"{logged(run)[step]['time'] - (killed or done.began):.1f} s")
        killed = done.ended
    files = [path for path in (run / f"checkpoint-{newest_step(run)}").rglob("*") if path.is_file()]
    print(f"\ncheckpoint: {sum(path.stat().st_size for path in files) / 1e6:,.1f} MB")


def compare_saves(words: list[str], run: Path, args: argparse.Namespace) -> None:
    """Print how long each save of a run takes, and how long training pauses for it."""
    print_columns("background_save", "MB", "training pauses for", "complete after")
    for background in ("true", "false"):
        log, steps = run.with_name(f"{background}.log"), str(args.saves * args.checkpoint)
        options = [f"{run}-{background}", "--background_save", background, "--max_steps", steps]
        run_python([*words, *options], log=log, timeout=3600)
        sizes, totals, pauses = zip(*SAVED.findall(log.read_text(encoding="utf-8")), strict=True)
        print_row(background, sizes[-1], f"{', '.join(pauses)} s", f"{', '.join(totals)} s")


def measure_goodput(words: list[str], run: Path, args: argparse.Namespace) -> None:
    """Kill a worker every --minutes, and print the goodput and its parts."""
    log, began, signals = run.with_name("log"), time.time(), 0

    def strike() -> bool:
        nonlocal signals
        if time.time() - began > (signals + 1) * args.minutes * 60:
            signals += 1
            supervisor = psutil.Process().children()[0]
            family = supervisor.children(recursive=True)
            workers = [p for p in family if "train.py" in p.cmdline() and "launch" not in " ".join(p.cmdline())]
            if signals > args.kills:
                supervisor.send_signal(signal.SIGTERM)
            else:
                max(workers, key=psutil.Process.create_time).kill()
        return False

    command = ["-m", "gpt2_repro.supervise", "--", sys.executable, *words]
    command += ["--save_rolling_minutes", str(args.rolling_minutes)]
    seconds = run_python(command, log=log, timeout=36_000, stop=strike).seconds
    status = json.loads((run / "run_status.json").read_text(encoding="utf-8"))
    parts, saves = status["time_breakdown"], SAVED.findall(log.read_text(encoding="utf-8"))
    kept = parts["training"] + parts.get("data", 0.0)
    print_columns("kills", "time", "saves", "time in steps that were not lost", "goodput", "run_status.json")
    measured = [f"{seconds:,.0f} s", len(saves), f"{kept:,.0f} s", f"{kept / seconds:.1%}"]
    print_row(args.kills, *measured, f"{status['goodput']:.1%}")
    print("parts in seconds: " + ", ".join(f"{name} {value:,.1f}" for name, value in parts.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", help="Recipe of the run.")
    parser.add_argument("--processes", type=int, default=2, help="Training processes under ZeRO-1. (default: 2)")
    parser.add_argument("--checkpoint", type=int, default=20, help="Steps between two checkpoints. (default: 20)")
    parser.add_argument("--kills", type=int, default=3, help="Number of kills. (default: 3)")
    parser.add_argument("--saves", type=int, default=0, help="Compare runs with this number of saves; no kills.")
    parser.add_argument("--minutes", type=float, default=0, help="Minutes between two kills of a supervised run.")
    parser.add_argument("--rolling_minutes", type=float, default=0.25, help="Its --save_rolling_minutes. (0.25)")
    cut = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    args, options = parser.parse_args(sys.argv[1:cut]), sys.argv[cut + 1 :]
    print_header("torch", "transformers", "accelerate", "deepspeed")
    words = ["-m", "accelerate.commands.launch", "--config_file", "accelerate_configs/zero1.yaml"]
    words += ["--num_processes", str(args.processes), "--main_process_port", "0", "train.py", args.recipe]
    words += ["--disable_tqdm", "true"]
    if not args.minutes:
        words += ["--save_steps", str(args.checkpoint), "--logging_steps", "1"]
    with tempfile.TemporaryDirectory(prefix="kill-") as folder:
        run = Path(folder, "run")
        words += [*options, "--output_dir"]
        if args.saves:
            compare_saves(words, run, args)
        else:
            (measure_goodput if args.minutes else resume)([*words, str(run)], run, args)


if __name__ == "__main__":
    main()
