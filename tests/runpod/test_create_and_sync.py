"""create_pod.sh requires a deadline and a volume, and sync.sh checks its copies."""

import json
import re
import shlex
import subprocess
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from hf_xet import hash_files

from tests.runpod.conftest import ROOT, wait_for


GPU = ("--gpu", "NVIDIA A100-SXM4-80GB", "--n", 8, "--volume", "vol", "--hours", 4)


def options(pod, *words: object) -> dict[str, str]:
    """Return the options and values of the command that create_pod.sh prints."""
    code, output = pod.run("create_pod.sh", *words)
    assert code == 0 and "--yes" in output and pod.calls() == [], output
    line = shlex.split(output[output.index("runpodctl") : output.rindex("\n", 0, -1)].replace("\\\n", ""))
    assert line[:3] == ["runpodctl", "pod", "create"]
    return dict(zip(line[3::2], line[4::2], strict=True))


def test_a_pod_is_rented_only_when_that_is_typed(pod) -> None:
    given = options(pod, *GPU)
    assert given["--gpu-id"] == "NVIDIA A100-SXM4-80GB" and given["--gpu-count"] == "8"
    assert given["--network-volume-id"] == "vol" and given["--volume-mount-path"] == "/workspace"
    assert given["--ports"] == "22/tcp"  # for tar over ssh and rsync
    secrets = {name: f"{{{{ RUNPOD_SECRET_{name} }}}}" for name in ("HF_TOKEN", "WANDB_API_KEY")}
    assert json.loads(given["--env"]) == secrets | {"POD_HOURS": "4"}
    command = "bash runpod/run_and_stop.sh --hours 4 -- \\\n\ttrain.py --run_name \"it's $HOME\" 'a\\b'"
    assert json.loads(options(pod, *GPU, "--auto_run", command)["--env"])["AUTO_RUN"] == command
    assert options(pod, "--cpu", "--volume", "vol", "--hours", 8)["--compute-type"] == "cpu"
    given = options(pod, "--gpu", "A40", "--volume_gb", 80, "--hours", 8)
    assert given["--volume-in-gb"] == "80" and given["--cloud-type"] == "COMMUNITY"
    assert "--network-volume-id" not in given and "pod delete" not in given["--docker-args"]
    assert pod.run("create_pod.sh", *GPU, "--yes")[0] == 0
    assert pod.calls()[0].startswith("runpodctl pod create --name gpt2")


def test_the_code_reaches_the_pod_over_ssh(pod, tmp_path: Path) -> None:
    """The command of the page copies a clone with its history, without data, runs and environment."""
    page = (ROOT / "runpod" / "README.md").read_text(encoding="utf-8")
    section = page.partition("## Copy the code to the pod\n")[2]
    copy = re.search(r"^tar .*?\n.*?$", section, re.MULTILINE)
    assert copy
    # ssh -p PORT -i KEY root@IP COMMAND runs the command on this machine.
    pod.stub("ssh", '#!/usr/bin/env bash\necho "ssh ${*:1:5}" >>"$CALLS"\nexec bash -c "$6"\n')
    clone = tmp_path / "clone"
    for name in (".git/HEAD", "runpod/on_start.sh", "gpt2_repro/data/rows.py", "data/big", "runs/big", ".venv/big"):
        path = clone / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    command = copy[0].replace("/workspace", str(tmp_path / "volume"))
    settings = {"IP": "1.2.3.4", "PORT": "4022", "KEY": "my key"}
    subprocess.run(["bash", "-c", command], cwd=clone, env=pod.environment | settings, check=True)
    assert pod.calls("ssh") == ["ssh -p 4022 -i my key root@1.2.3.4"]
    copied = tmp_path / "volume" / "gpt2"
    files = sorted(str(path.relative_to(copied)) for path in copied.rglob("*") if path.is_file())
    assert files == [".git/HEAD", "gpt2_repro/data/rows.py", "runpod/on_start.sh"]


def test_short_names_of_cards(pod) -> None:
    names = {"A100 SXM 80 GB": "A100-SXM4-80GB", "h100 sxm": "H100 80GB HBM3", "A6000": "RTX A6000", "L4": "L4"}
    names |= {"4090": "GeForce RTX 4090", "RTX4090": "GeForce RTX 4090", "rtx 3090": "GeForce RTX 3090"}
    names |= {"RTX PRO 6000": "RTX PRO 6000 Blackwell Server Edition"}
    for name, gpu in names.items():
        assert options(pod, "--gpu", name, "--hours", 1, "--volume", "v")["--gpu-id"] == f"NVIDIA {gpu}"


def test_the_start_command_sets_the_pod_up_or_keeps_the_deadline(pod) -> None:
    text = options(pod, "--gpu", "A40", "--hours", 1.5, "--volume", "v")["--docker-args"]
    assert text.count("'") == 2  # RunPod splits the text like a shell
    assert "script=/workspace/gpt2/runpod/on_start.sh;" in text
    text = text.replace("/workspace/gpt2/runpod", str(pod.folder)).replace("/start.sh", str(pod.folder / "start.sh"))
    pod.stub("../start.sh", '#!/bin/bash\necho "started" >>"$CALLS"\n')
    pod.stub("../on_start.sh", 'echo "set up" >>"$CALLS"\n')
    subprocess.run(shlex.split(text), env=pod.environment, check=True)
    wait_for(lambda: set(pod.calls()) == {"set up", "started"})
    (pod.folder / "on_start.sh").unlink()
    pod.wake()
    subprocess.run(shlex.split(text), env=pod.environment, check=True)
    wait_for(lambda: len(pod.calls("runpodctl")) >= 8)  # the four commands are repeated
    assert pod.sleeps()[:2] == [5400, 60]
    ways = ("pod stop", "stop pod", "pod delete", "remove pod")
    assert pod.calls("runpodctl")[:4] == [f"runpodctl {way} pod1" for way in ways]


def test_a_copy_in_a_bucket_counts_once_every_hash_is_there(pod) -> None:
    """sync.sh accepts a copy in a bucket only if the hashes of all files match."""
    run, weights = pod.folder / "run", pod.folder / "run" / "final" / "model.safetensors"
    listed = pod.folder / "hub" / "api" / "buckets" / "me" / "mine" / "tree" / "copies" / "run"
    for path, text in ((run / "metrics.jsonl", "{}"), (weights, "weights"), (run / ".lock", ""), (listed, "")):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    hashes = {path.relative_to(run): hash_files([str(path)])[0].hash for path in (run / "metrics.jsonl", weights)}
    files = [{"type": "file", "path": f"copies/run/{path}", "size": 1, "xetHash": hashes[path]} for path in hashes]
    listed.write_text(json.dumps(files), encoding="utf-8")
    # A file server simulates the Hub: the path of the API contains the list of the files in the bucket.
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=pod.folder / "hub")) as hub:
        threading.Thread(target=hub.serve_forever, daemon=True).start()
        command = ("sync.sh", run, "hf://buckets/me/mine/copies/")
        address = f"http://127.0.0.1:{hub.server_port}"
        variables = {"PYTHON": sys.executable, "HF_ENDPOINT": address, "HF_HUB_OFFLINE": "0"}
        code, output = pod.run(*command, **variables)
        assert code == 0, output
        assert pod.calls("hf sync") == [f"hf sync {run} hf://buckets/me/mine/copies/run --exclude .lock --quiet"]
        assert pod.run(*command, **variables, STUB_hf="1")[0] != 0  # the copy command failed, although all files match
        weights.write_text("weightz", encoding="utf-8")  # other contents of the same size
        (run / "samples.jsonl").touch()
        code, output = pod.run(*command, **variables)
        assert code == 1 and "run: 2. Run" in output
        hub.shutdown()


@pytest.mark.parametrize(
    ("target", "differs", "code"), [("me@host:backup/", "", 0), ("me@host:", "<f.st...... metrics.jsonl", 1)]
)
def test_a_copy_by_rsync_counts_once_it_is_compared(pod, target: str, differs: str, code: int) -> None:
    """sync.sh accepts a copy made by rsync only if all files are equal."""
    run = pod.folder / "run"
    run.mkdir()
    # rsync itself appends `run`. If sync.sh appended `/run` to `me@host:`, the copy would be in the root directory.
    assert pod.run("sync.sh", f"{run}/", target, OUT_rsync=differs)[0] == code
    assert pod.calls("rsync --archive") == [
        f"rsync --archive --partial --exclude .lock {run} {target}",
        f"rsync --archive --checksum --dry-run --itemize-changes --exclude .lock {run} {target}",
    ]
    assert pod.run("sync.sh", run, target, STUB_rsync="23")[0] == 23


COPIES_FILES = """#!/usr/bin/env bash
# Copy a file or folder on the local disk, or list a folder.
echo "rsync $*" >>"$CALLS"
[[ $* != *dry-run* ]] || exit 0
if [[ $* == *list-only* ]]; then ls "${!#}"; else cp -r "${@: -2}"; fi
"""
COPIES_OBJECTS = """#!/usr/bin/env bash
# The same for a bucket, whose files are in the folder $BUCKET.
case "$1 $2" in
  "buckets ls") ls "${3/hf:\\/\\/buckets\\/me\\/mine/$BUCKET}" ;;
  "buckets cp") cp "${3/hf:\\/\\/buckets\\/me\\/mine/$BUCKET}" "${4/hf:\\/\\/buckets\\/me\\/mine/$BUCKET}" ;;
  *) cp -r "$2" "${3/hf:\\/\\/buckets\\/me\\/mine/$BUCKET}" ;;
esac
"""


@pytest.mark.parametrize("to_bucket", [False, True], ids=["rsync", "bucket"])
def test_a_copy_of_another_run_is_not_replaced(pod, to_bucket: bool) -> None:
    pod.stub("rsync", COPIES_FILES)
    pod.stub("hf", COPIES_OBJECTS)
    copies = pod.folder / "place"
    target = "hf://buckets/me/mine" if to_bucket else copies
    variables = {"PYTHON": sys.executable, "BUCKET": str(copies)}

    def sync(seed: int) -> int:
        run = pod.folder / str(seed) / "run"
        run.mkdir(parents=True, exist_ok=True)
        identity = {"run_identity": {"seed": seed}}
        (run / "environment.json").write_text(json.dumps(identity), encoding="utf-8")
        return pod.run("sync.sh", run, target, **variables)[0]

    (copies / "run").mkdir(parents=True)
    (copies / "run" / "notes.txt").touch()
    assert sync(1) == 2 and [path.name for path in (copies / "run").iterdir()] == ["notes.txt"]
    (copies / "run" / "environment.json").write_text('{"run_identity": {"seed": 1}, "seed": 1}', encoding="utf-8")
    before = (copies / "run" / "environment.json").read_bytes()
    assert sync(2) == 2 and (copies / "run" / "environment.json").read_bytes() == before
    assert sync(1) != 2 and (copies / "run" / "environment.json").read_bytes() != before
    archive = pod.folder / "archive" / "run"
    archive.mkdir(parents=True)
    assert pod.run("sync.sh", archive, target, **variables)[0] == 2  # it does not show whose it is


@pytest.mark.parametrize(
    ("words", "pod_id"),
    [
        ("create_pod.sh --yes --gpu A40 --volume v", "pod1"),  # no deadline
        ("create_pod.sh --yes --gpu A40 --hours 4", "pod1"),  # no volume
        ("create_pod.sh --yes --gpu A100 --volume v --hours 4", "pod1"),  # several cards
        ("create_pod.sh --yes --gpu T4 --volume v --hours 4", "pod1"),  # RunPod has no T4
        ("run_and_stop.sh --hours four -- train.py", "pod1"),
        ("run_and_stop.sh --hours 1 -- train.py --usd_per_hour 1", "pod1"),  # no price limit
        ("run_and_stop.sh --hours 1 --max_usd ten -- train.py --usd_per_hour 1", "pod1"),
        ("run_and_stop.sh --hours 1 --max_usd 10 -- train.py", "pod1"),  # no price
        ("run_and_stop.sh --keep -- train.py --max_usd=10", "pod1"),
        ("sync.sh no-such-run host:", "pod1"),
        ("deadline.sh 0.0", "pod1"),
        ("stop_pod.sh --nonsense", "pod1"),
        ("run_and_stop.sh --hours 1 --max_usd 9 -- train.py --usd_per_hour 1", None),  # not a pod
        ("stop_pod.sh", None),
        ("deadline.sh 1", None),
    ],
)
def test_a_mistake_costs_nothing(pod, words: str, pod_id: str | None) -> None:
    """Wrong options, or a machine that is not a pod, end a script before anything is rented or stopped."""
    code, output = pod.run(*shlex.split(words), RUNPOD_POD_ID=pod_id)
    assert code == 2 and "error: " in output
    assert pod.calls() == [] and not pod.processes("deadline.sh")
