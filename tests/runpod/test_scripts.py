"""The scripts of a rented pod, with stubs for everything that costs money or needs a network; each call is recorded."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import psutil
import pytest
import yaml


ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "runpod"
KEY = "rpa_SECRET"
# Writes what it was called with, and what it was given, and ends as it is told by a variable of its name.
STUB = """#!/usr/bin/env bash
name=$(basename "$0")
echo "$name $*" >>"$CALLS"
if [[ $name == curl ]]; then cat >>"$CALLS.stdin"; fi
code=STUB_${name//-/_} output=OUT_${name//-/_}
[[ -n ${!output:-} ]] && echo "${!output}"
exit "${!code:-0}"
"""
# Stands for every python: makes environments that hold itself, trains, reports.
PYTHON = """#!/usr/bin/env bash
echo "python $*" >>"$CALLS"
case "$*" in
  "-m venv"*) [[ -n ${NO_VENV:-} ]] && exit 1; mkdir -p "${!#}/bin"; cp "$0" "${!#}/bin/python" ;;
  *flash_attn_wheel*) echo "https://example.org/flash_attn.whl" ;;
  *"import flash_attn"*) exit "${FLASH_ATTN:-1}" ;;
  *"-m pip install"*flash_attn.whl*) exit "${WHEEL:-0}" ;;
  *"sys.version_info"*) printf py312-torch ;;
  *"importlib.metadata"*) echo 2.9.1+cu128 ;;
  "-m gpt2_repro.supervise"*)
    if [[ -n ${TRAINING:-} ]]; then exec bash -c "$TRAINING"; fi ;;
esac
exit 0
"""


@pytest.fixture
def pod(tmp_path: Path):
    """Runs a script as on a pod; `pod.calls()` is what it called, in order."""
    stubs, calls = tmp_path / "bin", tmp_path / "calls"
    stubs.mkdir()
    for name in ("runpodctl", "curl", "hf", "rsync", "tmux", "nvidia-smi"):
        (stubs / name).write_text(STUB)
    (stubs / "python").write_text(PYTHON)
    for path in stubs.iterdir():
        path.chmod(0o755)
    environment = {
        "PATH": f"{stubs}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "TMPDIR": str(tmp_path),
        "CALLS": str(calls),
        "PYTHON": "python",
        "WORKSPACE": str(tmp_path / "workspace"),
        "RUNPOD_POD_ID": "pod1",
        "RUNPOD_API_KEY": KEY,
        "STOP_WAIT": "0",
        "STOP_ROUNDS": "1",
        "SYNC_PAUSE": "0",
    }

    class Pod:
        @staticmethod
        def start(script: str, *words: object, **variables: str) -> subprocess.Popen[str]:
            command = ["bash", str(SCRIPTS / script), *map(str, words)]
            return subprocess.Popen(
                command,
                env=environment | variables,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )

        @classmethod
        def run(cls, script: str, *words: object, timeout: float = 60, **variables: str) -> tuple[int, str]:
            with cls.start(script, *words, **variables) as process:
                output, _ = process.communicate(timeout=timeout)
            assert KEY not in output + calls.read_text() if calls.exists() else KEY not in output
            return process.returncode, output

        @staticmethod
        def calls() -> list[str]:
            return calls.read_text().splitlines() if calls.exists() else []

        folder = tmp_path

    yield Pod
    # Deadlines that are armed outlive what armed them, as they should.
    for process in psutil.process_iter(["cmdline"]):
        if str(tmp_path) in " ".join(process.info["cmdline"] or []):
            for child in process.children(recursive=True):
                child.kill()
            process.kill()


WAYS = [
    "runpodctl pod stop pod1",
    "runpodctl stop pod pod1",
    'curl --config - --fail --silent --show-error --max-time 60 --request POST --header Content-Type: application/json --data {"action":"stop"} https://api.runpod.io/v2/pods/pod1/action',
    'curl --config - --fail --silent --show-error --max-time 60 --request POST --header Content-Type: application/json --data {"query":"mutation { podStop(input: {podId: \\"pod1\\"}) { id } }"} https://api.runpod.io/graphql',
]


def test_where_no_way_works_it_ends_loudly(pod) -> None:
    code, said = pod.run("stop_pod.sh", STUB_runpodctl="1", STUB_curl="22")
    assert code == 1 and "POD pod1 STILL RUNS AND IS PAID" in said
    assert pod.calls() == WAYS
    # The key goes through a pipe, and stands in no command line.
    assert (pod.folder / "calls.stdin").read_text().count(f'header = "Authorization: Bearer {KEY}"') == 2


@pytest.mark.parametrize(
    ("works", "stubs"),
    [(0, {}), (2, {"STUB_runpodctl": "1"}), (3, {"STUB_runpodctl": "1", "STUB_curl": "22"})],
)
def test_the_first_way_that_is_accepted_is_waited_for(pod, works: int, stubs: dict[str, str]) -> None:
    """The pod takes the script along when it stops; here nothing does, and it is ended while it waits."""
    process = pod.start("stop_pod.sh", STOP_WAIT="30", **stubs)
    deadline = time.monotonic() + 20
    while len(pod.calls()) < min(works + 1, 4) and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.5)
    assert pod.calls() == WAYS[: works + 1]
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def test_an_accepted_stop_that_does_nothing_is_not_the_end(pod) -> None:
    code, said = pod.run("stop_pod.sh", OUT_curl='{"errors": ["no"]}')
    assert code == 1 and pod.calls() == WAYS
    assert "stop asked for, by_command" in said and "pod1 still runs: the next way" in said
    assert "by_graphql failed" in said  # its errors come with code 200


def test_a_pod_with_a_network_volume_is_terminated(pod) -> None:
    pod.run("stop_pod.sh", RUNPOD_VOLUME_ID="volume")
    assert pod.calls()[:2] == ["runpodctl pod delete pod1", "runpodctl remove pod pod1"]
    assert '"action":"terminate"' in pod.calls()[2] and "podTerminate" in pod.calls()[3]


@pytest.mark.parametrize(("words", "variables"), [((), {"RUNPOD_POD_ID": ""}), (("halt",), {})])
def test_mistakes_of_stopping(pod, words: tuple[str, ...], variables: dict[str, str]) -> None:
    code, said = pod.run("stop_pod.sh", *words, **variables)
    assert code == 2 and said.startswith("error: ") and pod.calls() == []


@pytest.fixture
def run_folder() -> str:
    return "runs/none-of-this-name"


TRAIN = ("--", "accelerate", "launch", "train.py", "recipes/demo.yaml", "--output_dir", "runs/none-of-this-name")


def test_unattended_everything_comes_in_its_order(pod) -> None:
    code, said = pod.run("run_and_stop.sh", "--hours", 1, "--sync", "hf://buckets/me/mine", "--keep", *TRAIN)
    assert code == 0, said
    calls = pod.calls()
    assert (
        calls[0]
        == "python -m gpt2_repro.supervise -- accelerate launch train.py recipes/demo.yaml --output_dir runs/none-of-this-name"
    )
    assert "python -m gpt2_repro.report runs/none-of-this-name" in calls[1]
    # There is no such run to copy, which is a failure of the copy.
    assert said.count("there is no folder runs/none-of-this-name") == 3


@pytest.mark.parametrize("code", [0, 1])
def test_the_pod_is_stopped_whatever_the_training_does(pod, code: int) -> None:
    ended, said = pod.run("run_and_stop.sh", "--hours", 0.1, "--grace", 0, *TRAIN, TRAINING=f"exit {code}")
    assert f"the training ended with exit code {code}" in said
    assert pod.calls()[-4:] == WAYS and ended == 1  # no way works here
    assert ("for somebody to look" in said) is bool(code)


def test_what_was_not_copied_is_stopped_and_not_terminated(pod) -> None:
    pod.run("run_and_stop.sh", "--hours", 1, "--sync", "hf://buckets/me/mine", *TRAIN, RUNPOD_VOLUME_ID="volume")
    assert "runpodctl pod stop pod1" in pod.calls() and "runpodctl pod delete pod1" not in pod.calls()


def test_the_deadline_stops_the_pod_whatever_runs(pod) -> None:
    process = pod.start("run_and_stop.sh", "--hours", 0.0003, *TRAIN, TRAINING="trap '' TERM; sleep 6")
    deadline = time.monotonic() + 20
    while "runpodctl pod stop pod1" not in pod.calls() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert process.poll() is None  # the training still runs
    assert pod.calls()[:2] == [pod.calls()[0], "runpodctl pod stop pod1"]
    process.communicate(timeout=60)


def test_before_the_deadline_the_training_is_told_to_end(pod) -> None:
    saved = pod.folder / "saved"
    training = f"trap 'touch {saved}; exit 0' TERM; while :; do sleep 0.1; done"
    # 20 s, of which the last two are for the checkpoint.
    process = pod.start("run_and_stop.sh", "--hours", 20 / 3600, *TRAIN, TRAINING=training)
    said, _ = process.communicate(timeout=60)
    assert saved.exists() and "the training ended with exit code 0" in said and pod.calls()[-4:] == WAYS
    deadlines = (pod.folder / "workspace" / "logs" / "deadline.log").read_text()
    assert "the training is told to end" in deadlines and "stopping the pod" not in deadlines


def test_a_signal_reaches_the_training_and_the_rest_goes_on(pod) -> None:
    saved = pod.folder / "saved"
    training = f"trap 'touch {saved}; exit 0' TERM; touch {saved}.began; while :; do sleep 0.1; done"
    process = pod.start("run_and_stop.sh", "--hours", 1, "--grace", 0, *TRAIN, TRAINING=training)
    deadline = time.monotonic() + 20
    while not saved.with_name("saved.began").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=60)
    assert saved.exists() and "the training ended with exit code 0" in said and pod.calls()[-4:] == WAYS


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (TRAIN, "--hours H is needed"),
        (("--hours", "four", *TRAIN), "--hours H is needed"),
        (("--hours", 1), "there is no command"),
        (("--hour", 1, *TRAIN), "there is no option --hour"),
        (("--hours",), "an option needs its value"),
    ],
)
def test_mistakes_of_running_cost_nothing(pod, words: tuple[object, ...], message: str) -> None:
    code, said = pod.run("run_and_stop.sh", *words)
    assert code == 2 and message in said and pod.calls() == []


@pytest.fixture
def hub():
    """A Hub that holds one bucket; `hub.files` is what lies there, path to hash; `hub.address` where it answers."""

    class Hub(BaseHTTPRequestHandler):
        files: ClassVar[dict[str, str]] = {}
        address = ""

        def do_GET(self) -> None:
            assert self.path.startswith("/api/buckets/me/mine/tree/copies%2Frun?recursive=")
            entries = [
                {"type": "file", "path": path, "size": 1, "xetHash": digest} for path, digest in self.files.items()
            ]
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(entries).encode())

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    Hub.address = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield Hub
    server.shutdown()
    server.server_close()


def test_a_copy_in_a_bucket_counts_once_every_hash_is_there(pod, hub) -> None:
    from hf_xet import hash_files

    run = pod.folder / "run"
    (run / "final").mkdir(parents=True)
    for path, text in (
        (run / "metrics.jsonl", "{}"),
        (run / "final" / "model.safetensors", "weights"),
        (run / ".lock", ""),
    ):
        path.write_text(text)
        if path.name != ".lock":
            hub.files[f"copies/{path.relative_to(pod.folder)}"] = hash_files([str(path)])[0].hash
    command = ("sync.sh", run, "hf://buckets/me/mine/copies/")
    variables = {"PYTHON": sys.executable, "HF_ENDPOINT": hub.address, "HF_HUB_OFFLINE": "0"}
    code, said = pod.run(*command, **variables)
    assert code == 0 and "compared" in said, said
    assert pod.calls() == [f"hf sync {run} hf://buckets/me/mine/copies/run --exclude .lock --quiet"]
    (run / "final" / "model.safetensors").write_text("weightz")  # of the same size
    code, said = pod.run(*command, **variables)
    assert code == 1 and "1 files of" in said
    (run / "final" / "model.safetensors").write_text("weights")
    hub.files.pop("copies/run/metrics.jsonl")
    assert pod.run(*command, **variables)[0] == 1
    assert pod.run(*command, **variables, STUB_hf="1")[0] != 0


@pytest.mark.parametrize(("differs", "code"), [("", 0), ("<f.st...... metrics.jsonl", 1)])
def test_a_copy_by_rsync_counts_once_it_is_compared(pod, differs: str, code: int) -> None:
    run = pod.folder / "run"
    run.mkdir()
    ended, said = pod.run("sync.sh", run, "me@host:backup", OUT_rsync=differs)
    assert ended == code and ("compared" in said) is (code == 0)
    assert pod.calls()[-1].startswith("rsync --archive --checksum --dry-run")
    assert pod.run("sync.sh", run)[0] == 2


def log(pod) -> str:
    return (pod.folder / "workspace" / "logs" / "on_start.log").read_text()


def test_a_second_start_installs_nothing_and_takes_seconds(pod) -> None:
    assert pod.run("on_start.sh") == (0, "")
    first = pod.calls()
    assert any(call.startswith("python -m venv --system-site-packages") for call in first)
    assert any("--requirement" in call for call in first) and any("flash_attn.whl" in call for call in first)
    assert "no wheel fits, attention is SDPA" in log(pod) and "ready: ." in log(pod)
    constraints = next((pod.folder / "workspace" / "venvs").glob("*/constraints.txt")).read_text()
    assert constraints == "torch==2.9.1+cu128\n"
    began = time.monotonic()
    assert pod.run("on_start.sh") == (0, "")
    assert time.monotonic() - began < 5
    again = pod.calls()[len(first) :]
    assert not any(word in call for call in again for word in ("pip install", "-m venv", "preflight"))
    settings = (pod.folder / "workspace" / "gpt2.env").read_text()
    assert "venvs/py312-torch2.9.1+cu128-" in settings and KEY not in settings + log(pod)


def test_other_cards_are_looked_at_again(pod) -> None:
    for card in ("NVIDIA H100 PCIe, 570.86", "NVIDIA H100 PCIe, 570.86", "NVIDIA H100 PCIe, 580.65"):
        variables = {"OUT_nvidia_smi": card}
        before = len(pod.calls())
        pod.run("on_start.sh", **variables)
        looked = any(call.endswith("-m gpt2_repro.preflight") for call in pod.calls()[before:])
        assert looked is (before == 0 or "580" in card)


def test_a_flash_attn_wheel_is_trusted_once_it_is_imported(pod) -> None:
    pod.run("on_start.sh")  # installed, and not importable
    assert any("pip uninstall" in call and "flash-attn" in call for call in pod.calls())
    assert not any("--no-build-isolation" in call for call in pod.calls())  # nothing is compiled
    before = len(pod.calls())
    pod.run("on_start.sh")
    assert not any("flash_attn" in call for call in pod.calls()[before:])


@pytest.mark.parametrize(("answer", "again"), [("22", False), ("6", True)])
def test_a_wheel_that_the_network_kept_away_is_tried_again(pod, answer: str, again: bool) -> None:
    variables = {"WHEEL": "1", "STUB_curl": answer}  # 22: not found; 6: no such host
    pod.run("on_start.sh", **variables)
    before = len(pod.calls())
    pod.run("on_start.sh", **variables)
    assert any("flash_attn.whl" in call for call in pod.calls()[before:]) is again


def test_flash_attn_is_compiled_when_that_is_said(pod) -> None:
    pod.run("on_start.sh", WHEEL="1", STUB_curl="22", BUILD_FLASH_ATTN="1")
    (build,) = [call for call in pod.calls() if "--no-build-isolation" in call]
    assert build.endswith("requirements-gpu.txt") and "flash-attn: was compiled" in log(pod)


def test_a_start_that_fails_does_not_fail_the_container(pod) -> None:
    assert pod.run("on_start.sh", NO_VENV="1") == (0, "")
    assert "THE ENVIRONMENT COULD NOT BE INSTALLED" in log(pod)
    assert not list((pod.folder / "workspace" / "venvs").glob("*/.ok"))
    assert pod.run("on_start.sh") == (0, "") and "ready: ." in log(pod)  # and the next start makes it good


def test_the_deadline_is_armed_first_and_once(pod) -> None:
    variables = {"POD_HOURS": "0.0004", "RUNPOD_POD_ID": "pod2"}
    assert pod.run("on_start.sh", NO_VENV="1", **variables)[0] == 0
    assert pod.run("on_start.sh", NO_VENV="1", **variables)[0] == 0
    assert log(pod).count("the pod is stopped in 0.0004 hours at the latest") == 1
    assert log(pod).index("at the latest") < log(pod).index("COULD NOT BE INSTALLED")
    deadline = time.monotonic() + 20
    while "runpodctl pod stop pod2" not in pod.calls() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert "runpodctl pod stop pod2" in pod.calls()


def test_a_number_of_another_process_is_no_deadline(pod) -> None:
    """A container that was restarted keeps its /tmp, and its processes have the old ones' numbers."""
    marker = pod.folder / "pod-deadline-pod1"
    marker.write_text(str(os.getpid()))
    pod.run("on_start.sh", POD_HOURS="1")
    assert "the pod is stopped in 1 hours at the latest" in log(pod) and marker.read_text() != str(os.getpid())


def test_a_command_is_started_in_tmux_once(pod) -> None:
    pod.run("on_start.sh", AUTO_RUN="bash runpod/run_and_stop.sh --hours 4 'a b'", STUB_tmux="1")
    (new,) = [call for call in pod.calls() if call.startswith("tmux new-session -d -s run")]
    script = pod.folder / "workspace" / "auto_run.sh"
    assert str(script) in new and script.read_text().splitlines()[1] == "bash runpod/run_and_stop.sh --hours 4 'a b'"
    before = len(pod.calls())
    pod.run("on_start.sh", AUTO_RUN="bash runpod/run_and_stop.sh --hours 4")  # the session is there
    assert not any("new-session" in call for call in pod.calls()[before:])


def test_a_pod_is_rented_only_when_that_is_typed(pod) -> None:
    words = ("--gpu", "NVIDIA A100-SXM4-80GB", "--n", 8, "--volume", "vol", "--hours", 4)
    code, said = pod.run("create_pod.sh", *words)
    assert code == 0 and "nothing was rented" in said and pod.calls() == []
    assert "--gpu-count 8" in said and "POD_HOURS" in said and "RUNPOD_SECRET_HF_TOKEN" in said
    assert pod.run("create_pod.sh", *words, "--yes")[0] == 0
    assert (
        pod.calls()[0].startswith("runpodctl pod create --name gpt2") and "--network-volume-id vol" in pod.calls()[0]
    )
    assert pod.run("create_pod.sh", "--cpu", "--volume", "vol")[1].count("--compute-type cpu") == 1
    for bad in (("--gpu", "H100"), ("--n", 8), ("--gpus", 8)):
        assert pod.run("create_pod.sh", *bad)[0] == 2


def test_a_job_of_the_hub_is_started_only_when_that_is_typed(pod) -> None:
    script, words = "../cloud/hf_jobs.sh", ("me/mine", "https://example.org/gpt2.git")
    code, said = pod.run(script, *words)
    assert code == 0 and "nothing was started" in said and pod.calls() == []
    assert "hf jobs run --flavor a100x8 --timeout 4h --secrets HF_TOKEN -v hf://buckets/me/mine:/bucket" in said
    assert pod.run(script, *words, "--yes")[0] == 0 and pod.calls()[0].startswith("hf jobs run")
    assert pod.run(script)[0] == 2


def test_the_two_stages_of_skypilot_use_options_that_are_there() -> None:
    _, prepare, train = yaml.safe_load_all((ROOT / "cloud" / "skypilot.yaml").read_text())
    assert "accelerators" not in prepare["resources"] and train["resources"]["accelerators"] == "A100-80GB:8"
    assert {stage["workdir"] for stage in (prepare, train)} == {"."} and "--max_hours 4" in train["run"]
    assert prepare["file_mounts"] == train["file_mounts"]


@pytest.mark.parametrize("page", ["runpod/README.md", "cloud/lambda.md"])
def test_what_the_pages_type_is_there(page: str) -> None:
    text = (ROOT / page).read_text()
    for script, rest in re.findall(r"bash runpod/(\w+\.sh)([^\n|]*)", text):
        options = set(re.findall(r"(?<= )--\w+", rest.partition(" -- ")[0]))
        known = set(
            re.findall(r"(?<=^    )--\w+(?=\))|(?<= )--\w+(?=\))", (SCRIPTS / script).read_text(), flags=re.MULTILINE)
        )
        assert (SCRIPTS / script).is_file() and options <= known, f"{script}: {options - known}"
