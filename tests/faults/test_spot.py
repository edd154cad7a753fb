"""A spot machine disappears at random moments while its run is copied to an unreliable object store.

The long form has the same code:

    SPOT_SECONDS=3600 SPOT_STEPS=2000 SPOT_KILLS=8 SPOT_LOG=spot .venv/bin/python -m pytest -s -m chaos \
        tests/faults/test_spot.py
"""

import contextlib
import json
import os
import random
import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from gpt2_repro.checkpoints.place import Place
from gpt2_repro.data.arguments import DataArguments
from gpt2_repro.data.preparation.prepare import prepare
from tests.commands import kill_all, start_cold
from tests.conftest import TINY
from tests.faults.runs import losses, results


pytest.importorskip("moto", reason="pip install 'moto[server]' s3fs")
pytest.importorskip("s3fs", reason="pip install 'moto[server]' s3fs")

from tests.faults.object_store import Weather, object_store  # needs moto


pytestmark = pytest.mark.chaos

SECONDS = float(os.environ.get("SPOT_SECONDS", "0"))  # of each test: rounds are started until then
STEPS = int(os.environ.get("SPOT_STEPS", "200"))
KILLS = int(os.environ.get("SPOT_KILLS", "1"))  # in a round
SAVE_STEPS = 50
SEED = int(os.environ.get("SPOT_SEED", "1"))
LOG = os.environ.get("SPOT_LOG", "")  # a folder for the memory over time and the logs
SAMPLE_SECONDS = 10.0
RATE = 0.03  # of requests that fail, apart from outages and deletions
# Of 2,000 steps. Undisturbed runs with 1 or 4 processes differ from the one with 2 by up to 6e-5 and 1.8e-4.
ROUNDING = 5e-4
FAILED_STARTS = 10  # in a row, after which the trial ends: an outage lasts 4 seconds
OPTIONS = (
    *(
        "--max_steps",
        STEPS,
        "--save_steps",
        SAVE_STEPS,
        "--eval_steps",
        SAVE_STEPS,
        "--logging_steps",
        5,
        "--ema_steps",
        20,
    ),
    *("--keep_checkpoints", 0, "--save_rolling_minutes", 0.05, "--save_minutes", 0, "--sample_tokens", 0),
)


@pytest.fixture(scope="module")
def recipe(corpus: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the recipe of a model with 2 layers of width 64 and rows of 64 tokens."""
    folder = tmp_path_factory.mktemp("spot")
    data = TINY["data"] | {"data_files": [str(path) for path in corpus], "dataset_dir": str(folder / "data")}
    data["sequence_length"] = 64
    prepare(DataArguments(**data))
    model = TINY["model"] | {"n_embd": 64}
    training = TINY["training"] | {"learning_rate": 1e-3, "per_device_train_batch_size": 1}
    path = folder / "spot.yaml"
    sections = TINY | {"data": data, "model": model, "training": training}
    path.write_text(yaml.safe_dump(sections), encoding="utf-8")
    return path


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    """Return the folder of the logs, which stays after the test if SPOT_LOG is set."""
    folder = Path(LOG).absolute() if LOG else tmp_path / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


class Background:
    """A command in the background of the trial, which can be killed and started again."""

    def __init__(self, words: tuple[object, ...], log: Path, env: dict[str, str]) -> None:
        self.words = words
        self.log = log
        self.env = env
        self.starts = 0
        self.process: Any = None

    def start(self) -> None:
        path = self.log.with_name(f"{self.log.name}-{self.starts}.log")
        self.starts += 1
        self.process = start_cold(self.words, self.env, path)

    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def kill(self) -> None:
        """Kill the command and all its descendants, as if the machine had disappeared."""
        if not self.is_running():
            return
        left = psutil.Process(self.process.pid).children(recursive=True)
        kill_all(self.process.pid)
        self.process.wait()
        _, alive = psutil.wait_procs(left, timeout=30)
        assert not alive


class Round:
    """One run with its place, its follower, and the machines that train it one after the other."""

    def __init__(self, number: int, name: str, folder: Path, logs: Path, recipe: Path, env: dict[str, str]) -> None:
        self.run = folder / f"{name}-{number}"
        self.place = f"s3://spot/{name}-{number}"
        self.scores = folder / f"{name}-{number}-scores"
        self.recipe = recipe
        self.env = env
        self.log = logs / f"{name}-{number}"
        self.trainer: Background | None = None
        self.follower = Background(
            ("bash", "evaluate.sh", self.place, "--follow", "--output_dir", self.scores),
            self.log.with_name(f"{self.log.name}-follow"),
            env,
        )
        self.machines = 0
        self.counts: Counter[str] = Counter()
        self.scored: dict[str, set[int]] = {}  # the times of the scores of each manifest

    def train(self, processes: int) -> None:
        """Start the training on a new machine."""
        words = ("launch", processes, "train.py", self.recipe, "--output_dir", self.run, "--disable_tqdm", "true")
        log = self.log.with_name(f"{self.log.name}-machine-{self.machines}")
        self.machines += 1
        self.trainer = Background((*words, *OPTIONS, "--sync_to", self.place), log, self.env)
        self.trainer.start()

    def step(self) -> int:
        """Return the last logged step, or -1."""
        path = self.run / "metrics.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        if not lines or not lines[-1].endswith("}"):
            return -1
        return json.loads(lines[-1])["step"]

    def copies(self) -> int:
        """Return how many checkpoints this machine has copied."""
        log = self.log.with_name(f"{self.log.name}-machine-{self.machines - 1}-0.log")
        return log.read_text(encoding="utf-8", errors="replace").count("copied checkpoint-")

    def note_scores(self) -> None:
        """Record the scores that the follower has written by now."""
        for path in self.scores.glob("*/manifest.json"):
            with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):
                key = f"{path.parent.name} {json.loads(path.read_text(encoding='utf-8'))['sha256']}"
                self.scored.setdefault(key, set()).add(path.stat().st_mtime_ns)

    def trees(self) -> dict[str, Background]:
        trees = {"follower": self.follower}
        if self.trainer is not None:
            trees["trainer"] = self.trainer
        return trees


def usage(background: Background) -> dict[str, int]:
    """Return the memory (RSS, bytes), open files and processes of a command and its descendants."""
    memory = 0
    files = 0
    count = 0
    with contextlib.suppress(psutil.Error):
        root = psutil.Process(background.process.pid)
        for process in [root, *root.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                memory += process.memory_info().rss
                files += process.num_fds()
                count += 1
    return {"rss": memory, "files": files, "processes": count}


@contextlib.contextmanager
def sampled(trial: Round, logs: Path) -> Iterator[None]:
    """Record the memory and open files of all commands of a round until the end of the block."""
    ended = threading.Event()

    def sample() -> None:
        last = 0.0
        while not ended.wait(0.5):
            trial.note_scores()
            if time.monotonic() - last < SAMPLE_SECONDS:
                continue
            last = time.monotonic()
            for name, background in trial.trees().items():
                if background.is_running():
                    line = {"time": time.time(), "run": trial.run.name, "of": name, "start": background.starts}
                    line |= {"machine": trial.machines, "step": trial.step(), **usage(background)}
                    with (logs / "usage.jsonl").open("a", encoding="utf-8") as file:
                        file.write(json.dumps(line) + "\n")

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        trial.note_scores()


def live(trial: Round, processes: int, copies: int, seconds: float) -> bool:
    """Train until a machine has copied so many checkpoints, or for some seconds. Return whether the run is complete.

    A start that fails, because the place cannot be reached, is repeated as the supervisor does.
    """
    deadline = time.monotonic() + seconds
    failures = 0
    trial.train(processes)
    while time.monotonic() < deadline and trial.copies() < copies:
        code = trial.trainer.process.poll()
        if code == 0:
            return True
        if code is not None:
            failures += 1
            trial.counts["failed starts"] += 1
            assert failures < FAILED_STARTS, f"see {trial.trainer.log}"
            time.sleep(2)
            trial.train(processes)
        time.sleep(0.05)
    return False


def disturb(trial: Round, choices: list[int], source: random.Random) -> None:
    """Train a run on machines that disappear KILLS times, and then to its end."""
    for kill in range(1, KILLS + 1):
        is_early = kill > 1 and source.random() < 0.2  # during the start, or shortly after
        seconds = source.uniform(0.5, 12) if is_early else 600
        if live(trial, source.choice(choices), source.choice([1, 1, 2]), seconds):
            break
        time.sleep(source.uniform(0, 2))
        trial.trainer.kill()
        trial.counts["kills"] += 1
        if kill % 3 == 1:
            shutil.rmtree(trial.run, ignore_errors=True)  # an early kill leaves none
            trial.counts["deleted run directories"] += 1
        if source.random() < 0.5:
            trial.counts["kills of the follower"] += trial.follower.is_running()
            trial.follower.kill()
        if not trial.follower.is_running():
            trial.follower.start()
    assert live(trial, source.choice(choices), STEPS, 1800)
    for path in trial.log.parent.glob(f"{trial.log.name}-machine-*.log"):
        text = path.read_text(encoding="utf-8", errors="replace")
        trial.counts["restores"] += text.count(f"restored {trial.run}")
        trial.counts["copies that failed"] += text.count("NOT COPIED")
    assert trial.counts["restores"] > 0


def lasting_copies(name: str) -> list[str]:
    """Return the names of the copies at a place that are scored: not the rolling ones, and not incomplete ones."""
    place = Place(name)
    copies = {f"checkpoint-{step}": manifest for step, manifest in place.manifests().items()}
    copies["final"] = place.manifest("final")
    names = [name for name, manifest in copies.items() if manifest and not manifest.get("rolling")]
    assert "final" in names
    return names


def score_the_rest(trial: Round) -> None:
    """Kill the follower, start it again, and wait until it has scored every copy of a lasting checkpoint."""
    trial.follower.kill()
    deadline = time.monotonic() + 300
    names = lasting_copies(trial.place)
    while any(not (trial.scores / name / "manifest.json").is_file() for name in names):
        assert time.monotonic() < deadline, f"not scored: see {trial.follower.log}"
        if not trial.follower.is_running():
            trial.follower.start()
        time.sleep(0.5)
    trial.follower.kill()


def check(trial: Round, golden: Path, *, is_exact: bool) -> None:
    """Compare a disturbed run with an undisturbed one, and check that no copy was scored twice.

    With changing numbers of processes, the promise is about the losses: rounding moves single weights by more.
    """
    if is_exact:
        assert results(trial.run) == results(golden)
    else:
        ours = {loss[:2]: loss[2] for loss in losses(trial.run)}
        theirs = {loss[:2]: loss[2] for loss in losses(golden)}
        assert ours == pytest.approx(theirs, abs=ROUNDING)
    twice = {key: times for key, times in trial.scored.items() if len(times) > 1}
    assert not twice


@pytest.mark.parametrize(("name", "choices"), [("same", [2]), ("changing", [1, 2, 4])], ids=["same", "changing"])
def test_a_spot_machine_with_an_unreliable_store(
    name: str, choices, recipe: Path, logs: Path, tmp_path: Path, monkeypatch
) -> None:
    """The runs end with the results of an undisturbed run, and each copied checkpoint is scored once."""
    golden = tmp_path / "golden"
    words = ("launch", 2, "train.py", recipe, "--output_dir", golden, "--disable_tqdm", "true", *OPTIONS)
    undisturbed = start_cold(words, {}, logs / f"{name}-golden.log")
    assert undisturbed.wait(1800) == 0, (logs / f"{name}-golden.log").read_text(encoding="utf-8")[-3000:]
    source = random.Random(SEED)
    weather = Weather(SEED, RATE)
    began = time.monotonic()
    with object_store(logs, weather) as env:
        for variable, value in env.items():
            monkeypatch.setenv(variable, value)
        number = 0
        while number == 0 or time.monotonic() - began < SECONDS:
            weather.rate = RATE
            trial = Round(number, name, tmp_path, logs, recipe, env)
            try:
                with sampled(trial, logs):
                    disturb(trial, choices, source)
                    weather.rate = 0.0  # the checks read the place
                    score_the_rest(trial)
            finally:
                for background in trial.trees().values():
                    background.kill()
            check(trial, golden, is_exact=len(choices) == 1)
            minutes = (time.monotonic() - began) / 60
            print(f"{name} {number}, {minutes:.1f} minutes: {dict(trial.counts)} {dict(weather.counts)}", flush=True)
            shutil.rmtree(trial.run)
            number += 1
