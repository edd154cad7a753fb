"""A pod is rented with a deadline and a volume or not at all; a copy counts once it is compared."""

import json
import re
import shlex
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from tests.runpod.conftest import ROOT, wait_for


GPU = ("--gpu", "NVIDIA A100-SXM4-80GB", "--n", 8, "--volume", "vol", "--hours", 4)


def options(pod, *words: object) -> dict[str, str]:
    """What the printed command gives to each option."""
    code, said = pod.run("create_pod.sh", *words)
    assert code == 0 and "nothing was rented" in said and pod.calls() == [], said
    line = shlex.split(said.splitlines()[0])
    assert line[:3] == ["runpodctl", "pod", "create"]
    return dict(zip(line[3::2], line[4::2], strict=True))


def test_a_pod_is_rented_only_when_that_is_typed(pod) -> None:
    given = options(pod, *GPU)
    assert given["--gpu-id"] == "NVIDIA A100-SXM4-80GB" and given["--gpu-count"] == "8"
    assert given["--network-volume-id"] == "vol" and given["--volume-mount-path"] == "/workspace"
    assert json.loads(given["--env"]) == {
        "HF_TOKEN": "{{ RUNPOD_SECRET_HF_TOKEN }}",
        "WANDB_API_KEY": "{{ RUNPOD_SECRET_WANDB_API_KEY }}",
        "POD_HOURS": "4",
    }
    assert pod.run("create_pod.sh", *GPU, "--yes")[0] == 0
    assert pod.calls()[0].startswith("runpodctl pod create --name gpt2")
    assert pod.run("create_pod.sh", *GPU, "--yes", STUB_runpodctl="3")[0] == 3


def test_other_pods(pod) -> None:
    given = options(pod, "--cpu", "--volume", "vol", "--hours", 8)
    assert given["--compute-type"] == "cpu" and "--gpu-id" not in given
    given = options(pod, "--gpu", "A40", "--volume_gb", 80, "--hours", 8)
    assert (
        given["--volume-in-gb"] == "80" and given["--cloud-type"] == "COMMUNITY" and "--network-volume-id" not in given
    )


def test_a_command_of_the_pod_arrives_as_it_was_typed(pod) -> None:
    command = "bash runpod/run_and_stop.sh --hours 4 -- \\\n\ttrain.py --run_name \"it's $HOME\" 'a\\b'"
    assert json.loads(options(pod, *GPU, "--auto_run", command)["--env"])["AUTO_RUN"] == command


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--n", 8, "--volume", "v", "--hours", 4), "--gpu CARD or --cpu is needed"),
        (("--gpu", "A40", "--volume", "v"), "--hours H is needed"),
        (("--cpu", "--volume", "v"), "--hours H is needed"),
        (("--gpu", "A40", "--volume", "v", "--hours", "four"), "--hours H is needed"),
        (("--gpu", "A40", "--volume", "v", "--hours", 4, "--n", "abc"), "--n wants a number"),
        (("--gpu", "A40", "--volume", "v", "--hours", 4, "--n", "1.5"), "--n wants a number"),
        (("--gpu", "A40", "--hours", 4), "without a volume a stop loses the run"),
        (("--gpu", "A40", "--hours", 4, "--volume", "v", "--volume_gb", 10), "not both"),
        (("--gpu", "A40", "--hours", 4, "--volume_gb", "much"), "--volume_gb wants"),
        (("--cpu", "--hours", 4, "--volume_gb", 10), "type --volume ID"),
        (("--gpus", 8), "there is no option --gpus"),
    ],
)
def test_mistakes_of_renting_cost_nothing(pod, words: tuple[object, ...], message: str) -> None:
    code, said = pod.run("create_pod.sh", *words, "--yes")
    assert code == 2 and message in said and pod.calls() == []


def start_command(pod, *words: object) -> list[str]:
    """The container's start command, with its places in the test's folder."""
    text = options(pod, *words)["--docker-args"]
    assert text.count("'") == 2  # RunPod takes it apart as a shell does
    text = text.replace("/workspace/gpt2/runpod", str(pod.folder)).replace("/start.sh", str(pod.folder / "start.sh"))
    (pod.folder / "start.sh").write_text('#!/bin/bash\necho "started" >>"$CALLS"\n')
    (pod.folder / "start.sh").chmod(0o755)
    return shlex.split(text)


def test_the_start_command_sets_the_pod_up(pod) -> None:
    assert "script=/workspace/gpt2/runpod/on_start.sh;" in options(pod, *GPU)["--docker-args"]
    command = start_command(pod, *GPU)
    (pod.folder / "on_start.sh").write_text('echo "set up" >>"$CALLS"\n')
    subprocess.run(command, env=pod.environment, check=True)
    wait_for(lambda: len(pod.calls()) == 2)
    assert set(pod.calls()) == {"set up", "started"}


@pytest.mark.parametrize(
    ("volume", "ways"),
    [
        (("--volume", "v"), ["pod stop pod1", "stop pod pod1", "pod delete pod1", "remove pod pod1"]),
        (("--volume_gb", 9), ["pod stop pod1", "stop pod pod1"]),
    ],
)
def test_without_the_repository_the_start_command_keeps_the_deadline(pod, volume, ways: list[str]) -> None:
    (pod.stubs / "sleep").write_text('#!/bin/bash\necho "sleep $1" >>"$CALLS"\n')
    (pod.stubs / "sleep").chmod(0o755)
    subprocess.run(start_command(pod, "--gpu", "A40", "--hours", 1.5, *volume), env=pod.environment, check=True)
    wait_for(lambda: len(pod.calls("runpodctl")) >= 2 * len(ways))  # again and again
    for process in pod.processes():
        subprocess.run(["kill", "-KILL", str(process)])
    calls = [call for call in pod.calls() if call not in ("started", "sleep 60")]
    assert calls[: 1 + len(ways)] == ["sleep 5400", *(f"runpodctl {way}" for way in ways)]


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
    assert pod.run(*command, **variables, STUB_hf="1")[0] != 0  # although all is there
    (run / "final" / "model.safetensors").write_text("weightz")  # of the same size
    code, said = pod.run(*command, **variables)
    assert code == 1 and "1 files of" in said
    (run / "final" / "model.safetensors").write_text("weights")
    hub.files.pop("copies/run/metrics.jsonl")
    assert pod.run(*command, **variables)[0] == 1


@pytest.mark.parametrize(("differs", "code"), [("", 0), ("<f.st...... metrics.jsonl", 1)])
def test_a_copy_by_rsync_counts_once_it_is_compared(pod, differs: str, code: int) -> None:
    run = pod.folder / "run"
    run.mkdir()
    ended, said = pod.run("sync.sh", f"{run}/", "me@host:backup/", OUT_rsync=differs)
    assert ended == code and ("compared" in said) is (code == 0)
    assert pod.calls() == [
        f"rsync --archive --partial --exclude .lock {run} me@host:backup/",
        f"rsync --archive --checksum --dry-run --itemize-changes --exclude .lock {run} me@host:backup/",
    ]
    assert pod.run("sync.sh", run, "me@host:backup", STUB_rsync="23")[0] == 23


def test_a_colon_means_the_home(pod) -> None:
    """rsync puts the folder behind it, by its name; me@host:/run would be the root of the host."""
    run = pod.folder / "run"
    run.mkdir()
    assert pod.run("sync.sh", run, "me@host:")[0] == 0
    assert [call.split()[-2:] for call in pod.calls()] == [[str(run), "me@host:"]] * 2


@pytest.mark.parametrize("target", ["hf://buckets/me/mine/copies", "me@host:backup"])
def test_a_place_is_tried_without_copying(pod, target: str) -> None:
    assert pod.run("sync.sh", "--check", target) == (0, "")
    (call,) = pod.calls()
    assert call == "hf buckets info me/mine" or (
        call.startswith("rsync --archive --dry-run") and call.endswith(target)
    )
    code, said = pod.run("sync.sh", "--check", target, STUB_hf="1", STUB_rsync="12")
    assert code == 2 and "cannot be reached" in said


@pytest.mark.parametrize("words", [(), ("run",), ("--check",), ("no-such-run", "host:"), ("--check", "hf://me/mine")])
def test_mistakes_of_copying(pod, words: tuple[str, ...]) -> None:
    code, said = pod.run("sync.sh", *words)
    assert code == 2 and said.startswith("error: ") and pod.calls() == []


def test_hf_knows_how_a_place_is_tried() -> None:
    """The stubs take everything; the command line of the installed `hf` is asked itself."""
    script = (ROOT / "runpod" / "sync.sh").read_text()
    for words in re.findall(r"^ +hf ([a-z ]+)", script, flags=re.MULTILINE):
        hf = Path(sys.executable).with_name("hf")
        answer = subprocess.run([hf, *words.split(), "--help"], capture_output=True, text=True)
        assert answer.returncode == 0 and "Usage: hf " + words.strip() in answer.stdout
