"""Train, kill and resume a run, and compare it with a bare PyTorch loop.

    python benchmarks/real_run.py --data_files 'books/*.jsonl.gz'                                 # 124M on all GPUs
    python benchmarks/real_run.py --data_files 'books/*.jsonl.gz' --phases export bare compare    # only these phases
    python benchmarks/real_run.py --data_files 'books/*.txt' --tokenizer train:1024 --processes 2 --steps 60 \\
        --eval_tokens 4096 -- --use_cpu --n_layer 2 --n_head 2 --n_embd 64 --sequence_length 64 \\
        --tokens_per_step 2048 --per_device_train_batch_size 8 --warmup_steps 10

The phases are prepare, start, train, export, bare and compare. If the script was interrupted, pass the missing phases
with --phases.

The bare loop starts from the same weights as the run, reads the same rows, and rounds to bf16 in the same places.
Options after `--` are passed to train.py. Options for fields of a recipe's data section are also passed to
prepare_data.py. All files are written to --work. results.json is written after each phase. If the script is
interrupted, only the results of the current phase are lost. The exit code is 1 if a check fails.
"""

import argparse
import json
import shlex
import shutil
import signal
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.machine import describe
from benchmarks.processes import Finished, logged, run_python
from gpt2_repro.checkpoints.rotation import newest_step


TOLERANCE = 0.005  # nats; mean difference of the logged training loss after step SETTLED
SETTLED = 50  # steps; half of all steps if a run is shorter than 100 steps
EXPORT_TOLERANCE = 0.01  # nats; last validation loss in bf16 compared with the fp32 loss of final/
COLD = 10  # steps after each start that are excluded from speeds
ENGINE = ("engine", "zero_optimizer", "weights", "matrix_products", "master_weights", "gradient_sums", "compiled")


class Bench:
    """Run the phases of the benchmark, and store their results in one folder.

    The results of a phase are `shown` (text by description), `checks` (booleans by description) and other values.
    """

    def __init__(self, args: argparse.Namespace, extra: list[str]) -> None:
        from gpt2_repro.config import values_of
        from gpt2_repro.recipe import load_recipe

        self.args, self.work = args, args.work.resolve()
        self.run, self.start, self.data = (self.work / name for name in ("run", "start", "data"))
        self.prepared = Path(args.data_files[0], "manifest.json").is_file()
        if self.prepared:
            self.data = Path(args.data_files[0]).resolve()
        recipe = load_recipe([args.recipe, *extra])
        data, model = recipe.data, recipe.model
        self.length = data.sequence_length
        self.shape = {key: getattr(model, key) for key in ("n_layer", "n_head", "n_embd")}
        self.shape["n_positions"] = self.length
        prepare = {"tokenizer": args.tokenizer, "dataset_dir": self.data, "split": "head"}
        prepare["validation_tokens"] = args.eval_tokens + self.length + 1
        prepare |= {key: value for key, value in values_of(data).items() if key in recipe.typed}
        self.prepare_command = ["prepare_data.py", args.recipe, "--data_files", *args.data_files, *options(prepare)]
        self.save_steps = args.steps // 6
        train = {
            "dataset_dir": self.data,
            "output_dir": self.run,
            "init_from": self.start,
            "max_steps": args.steps,
            "tokens_per_step": max(2, args.processes) * 64 * 1024,  # two passes a step on one GPU, one on more
            "per_device_train_batch_size": 64,
            "warmup_steps": min(50, args.steps // 2),
            "logging_steps": 1,
            "eval_steps": args.steps // 3,
            "eval_tokens": args.eval_tokens,
            "save_steps": self.save_steps,
            "hellaswag_steps": 0,  # its items are on the Hub
            "disable_tqdm": "true",
        }
        launcher = {"config_file": "accelerate_configs/zero1.yaml", "num_processes": args.processes}
        launch = ["-m", "accelerate.commands.launch", *options(launcher | {"main_process_port": 0})]
        self.train_command = [*launch, "train.py", args.recipe, *options(train), *extra]
        self.work.mkdir(parents=True, exist_ok=True)
        self.results: dict[str, Any] = {"commands": [], "phases": {}}
        if (self.work / "results.json").is_file():
            self.results = json.loads((self.work / "results.json").read_text(encoding="utf-8"))
        self.results["commands"].append(shlex.join(["python", *sys.argv]))

    def save(self, phase: str, **results: Any) -> None:
        self.results["phases"][phase] = results
        (self.work / "results.json").write_text(json.dumps(self.results, indent=1) + "\n", encoding="utf-8")

    def call(self, words: list[str], log: str, stop: Callable[[], bool] = lambda: False) -> Finished:
        return run_python(words, log=self.work / log, timeout=self.args.timeout, stop=stop)

    def prepare(self) -> None:
        seconds = 0.0 if self.prepared else self.call(self.prepare_command, "prepare.log").seconds
        counts = json.loads((self.data / "manifest.json").read_text(encoding="utf-8"))["counts"]
        tokens = [f"{split} {of['tokens']:,} in {of['documents']:,} documents" for split, of in counts.items()]
        self.save("prepare", shown={"time": f"{seconds:.1f} s", "tokens": ", ".join(tokens)})

    def fresh(self) -> None:
        words = ["start", str(self.data), str(self.start), json.dumps(self.shape)]
        done = self.call(["benchmarks/bare_loop.py", *words], "start.log")
        self.save("start", shown={"time": f"{done.seconds:.1f} s"})

    def train(self) -> None:
        """Train, kill all processes, add an incomplete checkpoint, and resume."""
        if self.run.exists():
            sys.exit(f"{self.run} already exists. Delete it, pass another --work, or omit train from --phases.")

        def is_time() -> bool:
            newest = newest_step(self.run)
            return newest > self.args.steps // 2 and max(logged(self.run)) >= newest + max(1, self.save_steps // 4)

        first = self.call(self.train_command, "train_1.log", stop=is_time)
        if not first.killed:
            sys.exit("The run ended before it could be killed. Pass a larger --steps.")
        before, newest, validated = logged(self.run), newest_step(self.run), logged(self.run, "eval_loss")[0]["time"]
        killed = max(before)
        # As after a kill during a save. The resumed run must skip this checkpoint.
        torn = self.run / f"checkpoint-{killed}"
        tear(self.run / f"checkpoint-{newest}", torn)

        second = self.call(self.train_command, "train_2.log")
        shutil.rmtree(torn, ignore_errors=True)
        log, losses = (self.work / "train_2.log").read_text(encoding="utf-8"), logged(self.run)
        environment, status = (
            json.loads((self.run / f"{name}.json").read_text(encoding="utf-8"))
            for name in ("environment", "run_status")
        )
        warm = [event for step, event in losses.items() if COLD < step <= newest or newest + COLD < step]
        speed, wait = (statistics.median(event[key] for event in warm) for key in ("tokens_per_second", "data_wait"))
        repeated = [abs(before[step]["loss"] - losses[step]["loss"]) for step in before if step > newest]
        plan, engine = environment["plan"], environment["engine"]
        batch = f"{plan['num_processes']} x {plan['micro_batch_size']} x {plan['sequence_length']} tokens per pass"
        self.save(
            "train",
            killed_at=killed,
            checkpoint=newest,
            tokens_per_second=speed,
            plan=plan,
            shown={
                "model and run": f"{environment['parameters']:,} parameters, {plan['max_steps']} steps of "
                f"{plan['tokens_per_step']:,} tokens, {batch}, {environment['precision']}, {environment['attention']}, "
                f"commit {environment['commit']}",
                "engine": ", ".join(f"{key} {engine[key]}" for key in ENGINE if key in engine),
                "time": f"{first.seconds + second.seconds:.1f} s",
                "start of the process to first validation": f"{validated - first.began:.1f} s",
                "start of the process to first step": f"{before[1]['time'] - first.began:.1f} s",
                f"SIGKILL after step {killed} to next step": f"{losses[newest + 1]['time'] - first.ended:.1f} s",
                f"the {killed - newest} repeated steps: largest loss difference": f"{max(repeated):.1e}",
                "ZeRO-1, median after warm-up": f"{speed:,.0f} tokens/s",
                "MFU (6N + 12LCT)": f"{statistics.median(e['mfu'] for e in warm):.1%}" if "mfu" in warm[0] else "-",
                "share of time waiting for data": f"{wait:.2%}",
                "peak GPU memory in use (nvidia-smi)": f"{max(first.peak_mib, second.peak_mib):,} MiB",
            },
            checks={
                "resumed from the newest complete checkpoint": f"resuming from {self.run}/checkpoint-{newest}\n"
                in log,
                "skipped the torn checkpoint": f"skipping {torn}: " in log,
                "every step was logged": list(losses) == list(range(1, self.args.steps + 1)),
                "the run is complete": status["state"] == "complete",
            },
        )

    def export(self) -> None:
        last = list(logged(self.run, "eval_loss").values())[-1]
        rows, out = last["eval_tokens"] // self.length, self.work / "export.json"
        words = ["stock", str(self.run / "final"), str(self.start), str(self.data), str(rows), str(out)]
        done = self.call(["benchmarks/bare_loop.py", *words], "export.log")
        read = json.loads(out.read_text(encoding="utf-8"))
        ids, losses = read["vocab_size"], f"{read['loss']:.4f}, {last['eval_loss']:.4f}"
        self.save(
            "export",
            shown={
                "time": f"{done.seconds:.1f} s",
                f"fp32 loss of final/ in stock transformers, last validation loss, {rows} rows": losses,
                "final/": f"{ids:,} ids, {read['dtype']}, {read['activation_function']}",
            },
            checks={
                "final/ loads without this project": not read["project_modules"],
                "loss close to the last validation loss": abs(read["loss"] - last["eval_loss"]) < EXPORT_TOLERANCE,
                "tensors, shapes and configuration keys match a stock save": not read["differs_from_stock"],
                "the activation is gelu_new": read["activation_function"] == "gelu_new",
                "vocabulary size equals the tokenizer's": ids == read["tokenizer_ids"],
            },
        )

    def bare(self) -> None:
        out = self.work / "bare.json"
        done = self.call(["benchmarks/bare_loop.py", "bare", str(self.run), str(out)], "bare.log")
        read = json.loads(out.read_text(encoding="utf-8"))
        speed = read["tokens_per_step"] / statistics.median(read["step_seconds"][COLD:])
        shown = {"time": f"{done.seconds:.1f} s", "one process, median after warm-up": f"{speed:,.0f} tokens/s"}
        shown["peak GPU memory in use (nvidia-smi)"] = f"{done.peak_mib:,} MiB"
        self.save("bare", shown=shown, tokens_per_second=speed, losses=read["losses"])

    def compare(self) -> None:
        phases = self.results["phases"]
        train, theirs = phases["train"], phases["bare"]["losses"]
        ours = [event["loss"] for event in logged(self.run).values()]
        settled = min(SETTLED, len(ours) // 2)
        means, shown = [], {}
        for name, after in (("all steps", 0), (f"after step {settled}", settled)):
            differences = [abs(a - b) for a, b in zip(ours[after:], theirs[after:], strict=True)]
            means.append(statistics.mean(differences))
            shown[f"difference of the training loss, {name}"] = f"mean {means[-1]:.5f}, max {max(differences):.5f}"
        ratio = train["tokens_per_second"] / train["plan"]["num_processes"] / phases["bare"]["tokens_per_second"]
        shown["speed per process under ZeRO-1, relative to the bare loop"] = f"{ratio:.3f}"
        checks = {f"mean difference after step {settled} under {TOLERANCE}": means[1] < TOLERANCE}
        self.save("compare", shown=shown, checks=checks)

    def table(self) -> str:
        """Return a Markdown block for RESULTS.md with the results of all finished phases."""
        lines = [describe("torch", "transformers", "accelerate", "deepspeed")]
        lines += [
            *(f"`{command}`" for command in self.results["commands"]),
            "",
            "| measurement | value |",
            "| --- | --- |",
        ]
        for phase, results in self.results["phases"].items():
            checks = {what: "yes" if passed else "**NO**" for what, passed in results.get("checks", {}).items()}
            lines += [f"| {phase}: {what} | {value} |" for what, value in (results["shown"] | checks).items()]
        return "\n".join(lines)


def options(values: dict[str, Any]) -> list[str]:
    return [word for key, value in values.items() for word in (f"--{key}", str(value))]


def tear(complete: Path, torn: Path) -> None:
    """Write an incomplete copy of the checkpoint `complete` to the folder `torn`."""
    # A program that saves directly to the checkpoint folder could leave such files when it is killed. This project saves
    # to a staging folder first.
    torn.mkdir()
    shutil.copy(complete / "manifest.json", torn)
    weights = (complete / "model.safetensors").read_bytes()
    (torn / "model.safetensors").write_bytes(weights[: len(weights) // 2])


def main(argv: list[str]) -> None:
    """Run the phases, print a block for RESULTS.md, and exit with 1 if a check failed."""
    own, extra = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", default="recipes/gpt2_124m.yaml", help="Recipe of the run.")
    parser.add_argument(
        "--data_files", nargs="+", required=True, help="Text for prepare_data.py, or a prepared folder."
    )
    parser.add_argument("--tokenizer", default="openai-community/gpt2", help="A Hub id, a local folder or train:N.")
    parser.add_argument("--work", type=Path, default=Path("runs/real_run"), help="Folder for all output.")
    parser.add_argument("--processes", type=int, help="Training processes. (default: the number of GPUs, or 1)")
    parser.add_argument("--steps", type=int, default=300, help="Optimizer steps of the run and of the bare loop.")
    parser.add_argument("--eval_tokens", type=int, default=262_144, help="Held-out validation tokens.")
    phases = ["prepare", "start", "train", "export", "bare", "compare"]
    parser.add_argument("--phases", nargs="+", choices=phases, default=phases, help="Phases, in this order.")
    parser.add_argument("--timeout", type=int, default=900, help="Time limit of one process in seconds.")
    args = parser.parse_args(own)
    if args.steps < 2 * COLD + 4:
        parser.error(f"--steps {args.steps} is too low. Pass {2 * COLD + 4} or more: the first {COLD} are not timed.")
    if args.processes is None:
        import torch

        args.processes = 1 if "--use_cpu" in extra else max(1, torch.cuda.device_count())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # exit normally, so that all workers are killed
    bench = Bench(args, extra)
    for phase in args.phases:
        print(f"{phase} ...", file=sys.stderr, flush=True)
        getattr(bench, {"start": "fresh"}.get(phase, phase))()
    print(bench.table())
    sys.exit(0 if all(all(phase.get("checks", {}).values()) for phase in bench.results["phases"].values()) else 1)


if __name__ == "__main__":
    from gpt2_repro import cli

    cli.run(main)
