"""Run each command with the sizes of a complete run of GPT-2 124M, and measure CPU time, memory and bytes read.

    python benchmarks/full_size.py ../shared/data --work full_size
    python benchmarks/full_size.py ../shared/data --work full_size --share 0.1 --parts build folder overlap

The prepared folder of 10B tokens has 75 hard links to one file of real rows, so it needs 0.3 GB of disk space. Only
the part `prepare` writes 20 GB. `training` trains a narrow model of one block with GPT-2's vocabulary. `checkpoint`
trains and exports GPT-2 124M.

Memory is sampled twice per second and summed over the processes of a command. "MB" counts pages that are not in
files. "with files" adds the mapped pages of files, which the system can drop at any time.
"""

import argparse
import contextlib
import gzip
import hashlib
import json
import os
import shutil
import sys
import time
from pathlib import Path

import numpy as np
import psutil


sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.evaluation import write_data, write_models
from benchmarks.machine import cpu_seconds, print_columns, print_header, print_row
from benchmarks.processes import run_python


RECIPE = "recipes/gpt2_124m.yaml"
STEPS, BIN_TOKENS = 18_865, 100_000_000
RESUMED = 8 * 18_000  # steps of one micro-batch; a step of the full run on one GPU has 8


class Bench:
    """Run one part of the benchmark per method."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.work, self.source, self.share = options.work.resolve(), options.data.resolve(), options.share
        self.data, self.run, self.documents = self.work / "data", self.work / "run", options.documents
        self.train = f"train.py {RECIPE} --use_cpu true --dataset_dir {self.data} --sample_tokens 0 --warmup_steps 1"
        self.narrow = f"{self.train} --n_layer 1 --n_head 1 --n_embd 16"

    def measure(self, name: str, command: str) -> None:
        """Run a command with python until it ends, and print a row of the table. Exits if the command fails."""
        peaks, before = [0.0] * 4, cpu_seconds()

        def sample() -> bool:
            time.sleep(0.5)
            peaks[:] = map(max, peaks, usage())
            return False

        seconds = run_python(command.split(), log=self.work / "log", timeout=86_400, stop=sample).seconds
        memory = [f"{peaks[0] / 1e6:,.0f}", f"{peaks[1] / 1e6:,.0f}", f"{peaks[2] / 1e9:.2f}", f"{peaks[3] / 1e9:.2f}"]
        print_row(name, f"{cpu_seconds() - before:.1f}", f"{seconds:.1f}", *memory)

    def build(self) -> None:
        """Write 1 GB of text, 103 token files, and the prepared folder."""
        text, tokens = self.work / "text/000.jsonl", self.work / "bin/train_000.bin"
        for path in (text, tokens):
            path.parent.mkdir(parents=True, exist_ok=True)
        novels = gzip.decompress((self.source / "prose/novels.jsonl.gz").read_bytes())
        text.write_bytes(novels * 4)
        link(text, round(1e9 * self.share / text.stat().st_size))
        ids = np.random.default_rng(0).integers(50_257, size=BIN_TOKENS, dtype=np.uint16)
        header = np.array([20_240_520, 1, BIN_TOKENS, *[0] * 253], np.int32)
        for path in (tokens, tokens.with_name("val_000.bin")):
            path.write_bytes(header.tobytes() + ids.tobytes())
        link(tokens, 2)
        self.measure("prepare 300M tokens", f"{self.preparation('bin')} --split source --dataset_dir {self.data}")
        link(tokens, round(103 * self.share))
        self.enlarge(round(75 * self.share))

    def preparation(self, source: str) -> str:
        text = f"--data_files {self.work}/{source}/* --tokenizer {self.source}/gpt2"
        return f"prepare_data.py {RECIPE} {text} --num_proc 2"

    def enlarge(self, count: int) -> None:
        """Replace the files of the training split by `count` links to the first file."""
        first, state = self.data / "train/data-00000.arrow", self.data / "train/state.json"
        for path in {*first.parent.glob("*.arrow")} - {first}:
            path.unlink()
        link(first, count)
        manifest = json.loads((self.data / "manifest.json").read_text(encoding="utf-8"))
        names = sorted(path.name for path in first.parent.glob("*.arrow"))
        files = {"_data_files": [{"filename": name} for name in names]}
        state.write_text(json.dumps(json.loads(state.read_text(encoding="utf-8")) | files), encoding="utf-8")
        manifest["files"]["train/state.json"] = hashlib.sha256(state.read_bytes()).hexdigest()
        shard = manifest["shards"]["train"][0]
        manifest["shards"]["train"] = [shard | {"name": name} for name in names]
        manifest["counts"]["train"] |= {"rows": count * shard["rows"], "row_tokens": count * shard["targets"]}
        (self.data / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")

    def prepare(self) -> None:
        for source, split in (("text", "--validation_tokens 10_000_000"), ("bin", "--split source")):
            command = f"{self.preparation(source)} {split} --dataset_dir {self.work}/prepared"
            self.measure(f"prepare_data.py, {source} files", command)
            shutil.rmtree(self.work / "prepared")

    def folder(self) -> None:
        self.measure("prepare_data.py --verify", f"prepare_data.py --verify --dataset_dir {self.data}")
        self.measure("train.py --dry_run", f"train.py {RECIPE} --dry_run --dataset_dir {self.data}")
        self.measure("preflight", f"-m gpt2_repro.preflight {RECIPE} --dataset_dir {self.data} --use_cpu true")

    def training(self) -> None:
        for name in ("run", "small", "scored"):
            shutil.rmtree(self.work / name, ignore_errors=True)
        one_row = f"{self.narrow} --tokens_per_step 1024 --per_device_train_batch_size 1 --eval_steps"
        small = f"{one_row} 0 --hellaswag_steps 0 --output_dir {self.work}/small --stop_at_step 1"
        self.measure("start, and a step of 1,024 tokens", small)
        step = f"{self.narrow} --hellaswag_steps 0 --eval_steps 0 --tokens_per_step 65_536 --output_dir {self.run}"
        self.measure("start, and a step of 65,536 tokens", f"{step} --stop_at_step 1")
        move_checkpoint(self.run, RESUMED)
        self.measure("resume after 9.4B tokens, and a step of 65,536", f"{step} --stop_at_step {RESUMED + 1}")
        data = f"--hellaswag_data {self.source}/hellaswag/hellaswag_val.jsonl.gz --hellaswag_steps 1"
        scored = f"{one_row} 1 {data} --eval_tokens 1024 --eval_on_start false --max_steps 2"
        self.measure("HellaSwag in the training of a narrow model", f"{scored} --output_dir {self.work}/scored")

    def report(self) -> None:
        """Write the log of a complete run into the run directory of the part `training`, and report it."""
        steps = range(1, round(STEPS * self.share) + 1)
        events = [{"step": step, "tokens": step * 524_288, "loss": 3.2 + 7 / step**0.5} for step in steps]
        validations = [{**event, "eval_loss": 3.2, "hellaswag_acc": 0.3} for event in events[::250]]
        samples = [{"step": step, "prompt": "", "text": "A sample of the text. " * 16} for step in steps[::250]]
        for name, objects in (("metrics", events + validations), ("samples", samples)):
            text = "".join(json.dumps(line) + "\n" for line in objects)
            (self.run / f"{name}.jsonl").write_text(text, encoding="utf-8")
        self.measure("report", f"-m gpt2_repro.report {self.run}")
        self.measure("report --check", f"-m gpt2_repro.report {self.run} --check")

    def overlap(self) -> None:
        """Search the training rows for the documents of the suite `quick`, and score one document per task."""
        options = f"--baseline none --limit 1 --check_overlap --output_dir {self.work}/overlap"
        self.measure("evaluate.sh --check_overlap", f"{self.evaluate(1.0)} {self.run} {options}")

    def checkpoint(self) -> None:
        run, place, second = self.work / "run_124m", self.work / "place", self.work / "run_alone"
        for folder in (run, place, second, self.work / "place_alone"):
            shutil.rmtree(folder, ignore_errors=True)
        launch = "-m accelerate.commands.launch --config_file accelerate_configs/zero1.yaml --num_processes 1"
        options = "--tokens_per_step 1024 --per_device_train_batch_size 1 --max_steps 3 --eval_steps 0"
        options = f"{self.train} {options} --hellaswag_steps 0"
        alone = f"{options} --no_background_save --sync_to {place}_alone --output_dir {second} --stop_at_step"
        train = f"{launch} --main_process_port 0 {options} --sync_to {place} --output_dir {run} --stop_at_step"
        self.measure("124M: a step of 1,024 tokens, save, copy", f"{train} 1")
        shutil.rmtree(run)
        self.measure("124M: restore the copy, a step, save, copy", f"{train} 2")
        self.measure("124M without DeepSpeed: a step, foreground save, copy", f"{alone} 1")
        shutil.rmtree(second)
        self.measure("124M without DeepSpeed: restore, a step, foreground save, copy", f"{alone} 2")
        for name in ("folder", "model.bin"):
            command = f"-m gpt2_repro.export {run}/checkpoint-2 {self.work}/exports/{name}"
            self.measure(f"124M: export to {name}", command)

    def evaluation(self) -> None:
        one, other = write_models(self.work / "model", self.source / "gpt2")
        options = f"--baseline {other} --output_dir {self.work}/scores"
        name = f"124M: evaluate.sh, two models, {self.documents:.1%} of the documents"
        self.measure(name, f"{self.evaluate(self.documents)} {one} {options}")

    def evaluate(self, share: float) -> str:
        """Return a command that scores a share of the documents of the suite `quick`."""
        folder = self.work / f"documents-{share}"
        folder.mkdir(exist_ok=True)
        write_data(self.source, folder, share)
        return f"-m gpt2_repro.evaluation --suite quick --no_cache --device cpu --local_data {folder}"


def link(path: Path, count: int) -> None:
    """Create hard links to a file with 000 in its name, so that there are `count` files."""
    for number in range(1, count):
        target = path.with_name(path.name.replace("000", f"{number:03}", 1))
        target.unlink(missing_ok=True)
        target.hardlink_to(path)


def usage() -> list[float]:
    """Return the bytes of all processes of a command: not in files, in memory, read, and read from a disk."""
    sums = [0.0] * 4
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error, OSError):  # the process may have ended
            lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text(encoding="utf-8").splitlines()[1:]
            sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
            counted = process.io_counters()
            own = [sizes["Pss"] - sizes["Pss_File"], sizes["Pss"], counted.read_chars, counted.read_bytes]
            sums = [one + other for one, other in zip(sums, own, strict=True)]
    return sums


def move_checkpoint(run: Path, step: int) -> None:
    """Turn checkpoint-1 into a checkpoint at another step."""
    from gpt2_repro.checkpoints.manifest import read_manifest, seal

    folder = (run / "checkpoint-1").rename(run / f"checkpoint-{step}")
    facts = {key: value for key, value in read_manifest(folder).items() if key not in ("files", "sha256")}
    state = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))
    (folder / "trainer_state.json").write_text(json.dumps(state | {"global_step": step}), encoding="utf-8")
    (folder / "manifest.json").unlink()
    seal(folder, {}, **facts)


def main() -> None:
    parts = ["build", "prepare", "folder", "training", "report", "overlap", "checkpoint", "evaluation"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="Folder with gpt2/, prose/, hellaswag/, lambada/ and wikitext/.")
    parser.add_argument("--work", type=Path, required=True, help="Folder for all files.")
    parser.add_argument("--share", type=float, default=1.0, help="Share of the tokens and steps. (default: 1)")
    parser.add_argument("--documents", type=float, default=0.01, help="Share of the documents to score. (0.01)")
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts, help="Default: all, in this order.")
    options = parser.parse_args()
    mark = options.work / ".full_size"
    if options.work.exists() and any(options.work.iterdir()) and not mark.exists():
        parser.error(f"{options.work} has other files, which the parts could delete. Pass an empty folder.")
    options.work.mkdir(parents=True, exist_ok=True)
    mark.touch()
    os.environ["HF_HUB_OFFLINE"] = "1"
    print_header("torch", "transformers", "datasets", "lm_eval")
    print_columns("command", "CPU s", "s", "MB", "MB with files", "GB read", "GB from disk")
    for part in options.parts:
        getattr(Bench(options), part)()


if __name__ == "__main__":
    main()
