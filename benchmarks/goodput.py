"""Measure the goodput of a run that is killed every few minutes.

    python benchmarks/goodput.py recipes/demo.yaml --processes 2 --minutes 1.5 --kills 3
    python benchmarks/goodput.py recipes/gpt2_124m.yaml --processes 8 --minutes 20 --kills 2 --rolling_minutes 2

Goodput for other failure rates is computed from the measured parts. Goodput is the share of the paid seconds in which
optimizer steps ran that the run kept. Prepare the data of the recipe first. A supervised run trains under ZeRO-1, a
worker is killed at each interval, and SIGTERM ends the run. Without supervision, the machine waits after a failure
until a person has noticed it (--notice_minutes). Options after `--` go to train.py.
"""

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil


sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.processes import ROOT, kill_all


def lost_seconds(parts: dict[str, float], kills: int, *, rolling: float, every: float) -> dict[str, float]:
    """Return the seconds that one failure and the saves cost in `every` seconds.

    Args:
        parts: `time_breakdown` of the measured run. Its attempts are the start and one restart after each kill.
        rolling: seconds between two checkpoints. On average, half of this time is repeated.
    """
    return {
        "restart": parts.get("startup", 0.0) / (kills + 1),
        "wait before the restart": parts.get("idle", 0.0) / max(1, kills),
        "redone steps": rolling / 2 + parts["writing"],
        "pauses for saves": parts["pause"] * every / rolling,
    }


def kill_repeatedly(command: list[str], run: Path, log: Path, args: argparse.Namespace) -> float:
    """Kill a worker every --minutes, then stop the run. Return its seconds."""
    began = time.time()
    with log.open("w", encoding="utf-8") as out:
        supervisor = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT)
    try:
        for number in range(args.kills + 1):
            time.sleep(max(0.0, began + (number + 1) * args.minutes * 60 - time.time()))
            if supervisor.poll() is not None:
                sys.exit(f"The run ended early. End of its log:\n{log.read_text(encoding='utf-8')[-3000:]}")
            if number < args.kills:
                workers = [
                    process
                    for process in psutil.Process(supervisor.pid).children(recursive=True)
                    if "train.py" in process.cmdline() and "launch" not in " ".join(process.cmdline())
                ]
                max(workers, key=lambda process: process.create_time()).kill()
        supervisor.send_signal(signal.SIGTERM)
        supervisor.wait(300)
    finally:
        kill_all(supervisor)
    return time.time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", help="Recipe of the run.")
    parser.add_argument("--processes", type=int, default=2, help="Training processes under ZeRO-1. (default: 2)")
    parser.add_argument("--minutes", type=float, default=1.5, help="Minutes between two kills. (default: 1.5)")
    parser.add_argument("--kills", type=int, default=3, help="Number of kills. (default: 3)")
    parser.add_argument(
        "--rolling_minutes", type=float, default=0.25, help="Of --save_rolling_minutes. (default: 0.25)"
    )
    parser.add_argument("--notice_minutes", type=float, default=30, help="Until a person restarts. (default: 30)")
    cut = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    args, options = parser.parse_args(sys.argv[1:cut]), sys.argv[cut + 1 :]
    with tempfile.TemporaryDirectory(prefix="goodput-") as folder:
        run, log = Path(folder, "run"), Path(folder, "log")
        command = [
            sys.executable,
            "-m",
            "gpt2_repro.supervise",
            "--",
            sys.executable,
            "-m",
            "accelerate.commands.launch",
        ]
        command += ["--config_file", "accelerate_configs/zero1.yaml", "--num_processes", str(args.processes)]
        command += ["--main_process_port", "0", "train.py", args.recipe, "--output_dir", str(run)]
        command += ["--save_rolling_minutes", str(args.rolling_minutes), "--disable_tqdm", "true", *options]
        seconds = kill_repeatedly(command, run, log, args)
        status = json.loads((run / "run_status.json").read_text(encoding="utf-8"))
        parts = status["time_breakdown"]
        saves = [
            line.split(" in ")[-1]
            for line in log.read_text(encoding="utf-8").splitlines()
            if "training paused for" in line
        ]
    writing = [float(line.split(" s,")[0]) for line in saves]
    pauses = [float(line.split("paused for ")[1].split()[0]) for line in saves]
    middle = {"writing": sorted(writing)[len(writing) // 2], "pause": sorted(pauses)[len(pauses) // 2]}
    kept = parts["training"] + parts.get("data", 0.0)
    found = f"{args.kills} kills in {seconds:,.0f} s, {len(saves)} saves"
    print(f"measured: {found}, {kept:,.0f} s in steps that were not lost")
    print("parts in seconds: " + ", ".join(f"{name} {value:,.1f}" for name, value in (parts | middle).items()))
    print(f"goodput measured {kept / seconds:.1%}, run_status.json {status['goodput']:.1%}")
    print("\n| one failure per | checkpoint every | supervised | without supervision | seconds lost per failure |")
    print("| --- | --- | --- | --- | --- |")
    for failure, rolling in ((args.minutes, args.rolling_minutes), (30, 2), (120, 2), (120, 15)):
        lost = lost_seconds(parts | middle, args.kills, rolling=rolling * 60, every=failure * 60)
        total, every = sum(lost.values()), failure * 60
        alone = (every - total) / (every + args.notice_minutes * 60)
        shown = ", ".join(f"{name} {value:.1f}" for name, value in lost.items())
        print(f"| {failure:g} min | {rolling:g} min | {1 - total / every:.1%} | {alone:.1%} | {shown} |")


if __name__ == "__main__":
    main()
