"""A pod from its start command to the request that ends it, with real programs and a provider on this machine."""

import contextlib
import http.server
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch  # its folder is given to the pod

from tests.commands import ROOT
from tests.runpod.conftest import KEY


pytestmark = pytest.mark.slow

PRICE = 3600  # dollars per hour: a second is a dollar
CURL = """#!/bin/bash
words=()
for word; do words+=("${word/https:\\/\\/api.runpod.io/$PROVIDER}"); done
exec "$REAL_CURL" "${words[@]}"
"""
RUNPODCTL = """#!/bin/bash
words=$*
exec "$REAL_CURL" --fail --silent --request POST "$PROVIDER/runpodctl/${words// //}"
"""


class Provider(http.server.ThreadingHTTPServer):
    """Answer requests as RunPod documents it, and end the pod's processes after an accepted one.

    Sources: https://docs.runpod.io, REST v2 (POST /v2/pods/ID/action) and GraphQL (podStop, podTerminate).
    """

    def __init__(self, interface: str) -> None:
        super().__init__(("127.0.0.1", 0), Requests)
        self.interface = interface  # the only one that works
        self.refused: list[str] = []
        self.state = "RUNNING"
        self.ended_at = 0.0
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def accepts(self, interface: str, verb: str) -> bool:
        if interface != self.interface:
            self.refused.append(interface)
            return False
        self.state = {"stop": "EXITED", "terminate": "TERMINATED"}[verb]
        self.ended_at = time.time()
        threading.Thread(target=self.end_pod).start()
        return True

    def end_pod(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            time.sleep(0.5)
            for process in self.processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, number)

    def processes(self) -> list[int]:
        """Return the processes of the pod."""
        mark = f"PROVIDER={self.address}\0".encode()
        found: list[int] = []
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark in (process / "environ").read_bytes():
                    found.append(int(process.name))
        return found


class Requests(http.server.BaseHTTPRequestHandler):
    server: Provider

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        _, interface, *words = self.path.split("/")
        if interface == "runpodctl":
            verbs = {"stop": "stop", "delete": "terminate", "remove": "terminate"}
            known = words in (["pod", "stop", "pod1"], ["pod", "delete", "pod1"])
            self.answer(known and self.server.accepts(interface, verbs[words[1]]), {})
            return
        assert self.headers["Authorization"] == f"Bearer {KEY}"
        request = json.loads(body)
        if interface == "v2":
            assert words == ["pods", "pod1", "action"]
            self.answer(self.server.accepts("rest", request["action"]), {"id": "pod1"})
            return
        assert interface == "graphql"
        stops = re.fullmatch(r'mutation \{ podStop\(input: \{podId: "pod1"\}\) \{ id \} \}', request["query"])
        ends = re.fullmatch(r'mutation \{ podTerminate\(input: \{podId: "pod1"\}\) \}', request["query"])
        assert stops or ends
        if self.server.accepts("graphql", "stop" if stops else "terminate"):
            self.answer(True, {"data": {"podStop": {"id": "pod1"}}})
        else:  # GraphQL answers with 200 in any case
            self.answer(True, {"errors": [{"message": "Something went wrong."}], "data": None})

    def answer(self, ok: bool, content: dict) -> None:
        text = json.dumps(content).encode()
        self.send_response(200 if ok else 404)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None:
        pass


class Pod:
    """A pod with this machine's programs, its own home and its own volume."""

    def __init__(self, folder: Path, provider: Provider, tiny_recipe: Path) -> None:
        self.provider = provider
        self.recipe = tiny_recipe
        self.home = folder / "home"
        self.workspace = folder / "workspace"
        self.run = self.workspace / "runs" / "mine"
        programs = folder / "programs"
        for path in (self.home, programs, folder / "tmp", self.workspace):
            path.mkdir()
        self.repository = self.workspace / "gpt2"
        for name in ("accelerate_configs", "ds_configs", "gpt2_repro", "recipes", "runpod", "tests"):
            shutil.copytree(ROOT / name, self.repository / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("train.py", "evaluate.sh", "requirements.txt"):
            shutil.copy(ROOT / name, self.repository)
        curl = shutil.which("curl")
        if curl is None:
            pytest.skip("curl is not installed")
        self.stub(programs / "curl", CURL)
        self.stub(programs / "runpodctl", RUNPODCTL)
        self.programs = programs
        self.environment = {
            "PATH": f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(Path(torch.__file__).parents[1]),  # the packages of the image
            "PIP_NO_INDEX": "1",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "HOME": str(self.home),
            "TMPDIR": str(folder / "tmp"),
            "TMUX_TMPDIR": str(folder / "tmp"),
            "WORKSPACE": str(self.workspace),
            "RUNPOD_POD_ID": "pod1",
            "RUNPOD_API_KEY": KEY,
            "PROVIDER": provider.address,
            "REAL_CURL": curl,
            "SYNC_PAUSE": "0",
            "STOP_WAIT": "20",
        }

    def stub(self, path: Path, script: str) -> None:
        path.write_text(script, encoding="utf-8")
        path.chmod(0o755)

    def training(self, *options: object, script: str = "train.py") -> str:
        """Return the training command, for a shell."""
        launcher = "accelerate launch --config_file accelerate_configs/ddp.yaml --num_processes 1"
        words = [launcher, script, self.recipe, "--output_dir", self.run, "--usd_per_hour", PRICE, *options]
        return " ".join(map(str, words))

    def live(self, command: str, **variables: str) -> None:
        """Start the pod with AUTO_RUN, and wait until the provider has ended it."""
        environment = self.environment | variables | {"AUTO_RUN": command}
        start = ["bash", str(self.repository / "runpod" / "on_start.sh")]
        subprocess.run(start, env=environment, stdin=subprocess.DEVNULL, check=True, timeout=300)
        deadline = time.monotonic() + 200
        while self.provider.state == "RUNNING" or self.provider.processes():
            assert time.monotonic() < deadline, self.log("*.log")
            time.sleep(0.2)

    def log(self, name: str) -> str:
        return "".join(path.read_text(encoding="utf-8") for path in sorted((self.workspace / "logs").glob(name)))

    def status(self) -> dict:
        return json.loads((self.run / "run_status.json").read_text(encoding="utf-8"))

    def parts(self) -> dict[str, int]:
        """Return the seconds of each part; check that they add up, and that each second costs a dollar."""
        line = r"time of (.*): (\d+) s \(\$(\d+)\.00\), since the start of the pod: (\d+) s \(\$(\d+)\.00\)"
        parts: dict[str, int] = {}
        for name, seconds, dollars, so_far, dollars_so_far in re.findall(line, self.log("run-*.log")):
            parts[name] = int(seconds)
            assert int(dollars) == int(seconds)
            assert int(so_far) == int(dollars_so_far) == sum(parts.values())
        return parts


@pytest.fixture
def pod(tmp_path: Path, tiny_recipe: Path, request: pytest.FixtureRequest) -> Iterator[Pod]:
    provider = Provider(request.param)
    pod = Pod(tmp_path, provider, tiny_recipe)
    yield pod
    for process in provider.processes():
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    provider.shutdown()
    shutil.rmtree(pod.repository)  # the tests in it have the key
    for path in tmp_path.rglob("*"):
        if path.is_file() and not path.is_symlink():
            assert KEY.encode() not in path.read_bytes(), path


RUN = "bash runpod/run_and_stop.sh --max_usd 100000 --grace 0.05"


@pytest.mark.parametrize("pod", ["runpodctl"], indirect=True)
def test_a_pod_with_a_network_volume_is_terminated_after_its_copy(pod: Pod, tmp_path: Path) -> None:
    if shutil.which("rsync") is None:
        pytest.skip("rsync is not installed")
    began = time.time()
    target = tmp_path / "copies"
    pod.live(f"{RUN} --hours 1 --sync {target} -- {pod.training()}", RUNPOD_VOLUME_ID="volume", POD_HOURS="2")
    assert pod.provider.state == "TERMINATED"
    assert pod.status()["state"] == "complete"
    assert (pod.run / "evaluation" / "comparison.json").is_file()
    for name in ("report.html", "final/model.safetensors", "pod.log", "console.log"):
        assert (target / "mine" / name).read_bytes() == (pod.run / name).read_bytes()
    parts = pod.parts()
    assert list(parts) == ["everything before the training", "the training", "evaluation and report", "the copy"]
    # Every second of the pod is in a part, from its start command to the request that ended it.
    assert sum(parts.values()) == pytest.approx(pod.provider.ended_at - began, abs=3)


@pytest.mark.parametrize("pod", ["rest"], indirect=True)
def test_a_pod_with_a_disk_is_stopped_if_nothing_was_copied(pod: Pod) -> None:
    """tmux is missing, and only the second interface of the provider works."""
    pod.stub(pod.programs / "tmux", "#!/bin/bash\nexit 127\n")
    pod.live(f"{RUN} --hours 1 --no_evaluation -- {pod.training()}")
    assert pod.provider.state == "EXITED" and "runpodctl" in pod.provider.refused
    assert pod.status()["state"] == "complete"
    assert "TMUX FAILED" in pod.log("on_start.log")


@pytest.mark.parametrize("pod", ["graphql"], indirect=True)
def test_a_run_that_fails_stops_the_pod_after_a_pause(pod: Pod) -> None:
    pod.live(f"{RUN} --hours 1 -- {pod.training('--learning_rate', 'fast')}", RUNPOD_VOLUME_ID="volume")
    # Nothing was copied, and no run directory is known.
    assert pod.provider.state == "EXITED" and {"runpodctl", "rest"} <= set(pod.provider.refused)
    assert "the training ended with exit code 2" in pod.log("run-*.log")
    parts = pod.parts()
    assert list(parts) == ["everything before the training", "the training", "waiting"] and parts["waiting"] >= 3


@pytest.mark.parametrize("pod", ["runpodctl"], indirect=True)
def test_a_copy_that_fails_keeps_the_disk(pod: Pod, tmp_path: Path) -> None:
    if shutil.which("rsync") is None:
        pytest.skip("rsync is not installed")
    other = tmp_path / "copies" / "mine"
    other.mkdir(parents=True)
    (other / "environment.json").write_text('{"run_identity": {"seed": 2}}', encoding="utf-8")
    command = f"{RUN} --hours 1 --no_evaluation --sync {tmp_path / 'copies'} -- {pod.training()}"
    pod.live(command)
    assert pod.provider.state == "EXITED"
    assert "THE COPY FAILED" in pod.log("run-*.log") and list(other.iterdir()) == [other / "environment.json"]
    assert (pod.run / "final" / "model.safetensors").is_file()
    assert list(pod.parts())[-2:] == ["the copy", "waiting"]


@pytest.mark.parametrize("pod", ["runpodctl"], indirect=True)
def test_a_deadline_in_the_middle_of_a_save_loses_only_that_save(pod: Pod, train, events) -> None:
    options = ("--max_steps", 60, "--save_steps", 20, "--eval_steps", 20)
    command = pod.training(*options, script="tests/faults/faulty_train.py")
    fault = {"FAULT": "slow_shards", "FAULT_AT": "40-60", "FAULT_RANK": "0", "FAULT_MARK": str(pod.home / "mark")}
    pod.live(f"{RUN} --hours 0.02 -- {command}", RUNPOD_VOLUME_ID="volume", **fault)
    assert (pod.home / "mark").is_file()  # the save of step 40 had begun
    assert pod.provider.state == "EXITED"  # not terminated: the timer does not know what was copied
    log = pod.log("deadline.log")
    assert "sent SIGTERM to the training" in log and "the deadline was reached" in log
    assert not (pod.run / "checkpoint-40").exists()
    # The next pod with this volume continues from the last complete checkpoint.
    train(pod.run, *options, "--usd_per_hour", PRICE)
    assert pod.status()["state"] == "complete"
    trained: list[int] = []  # steps of the second pod
    for event in events(pod.run):
        if "loss" in event and event["time"] > pod.provider.ended_at:
            trained.append(event["step"])
    assert trained == list(range(21, 61))
