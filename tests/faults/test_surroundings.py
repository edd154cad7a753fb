"""A run survives faults of disks, files, networks and other processes."""

import contextlib
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from gpt2_repro.checkpoints.rotation import newest_complete
from gpt2_repro.preflight import __main__ as preflight
from tests.commands import ROOT, start_cold
from tests.faults.runs import losses, results, status, weights


pytestmark = pytest.mark.faults

SAVES = ("--save_steps", 2, "--per_device_train_batch_size", 4)
LONG = (*SAVES, "--max_steps", 24)


@pytest.fixture
def silent() -> Iterator[tuple[str, list[socket.socket]]]:
    """Return the URL of a server that never answers, and its connections."""
    connections: list[socket.socket] = []

    def accept() -> None:
        with contextlib.suppress(OSError):  # the server was closed
            while True:
                connections.append(server.accept()[0])

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}", connections
        server.shutdown(socket.SHUT_RDWR)


def test_a_disk_that_becomes_read_only_costs_no_checkpoint(fault, resumes_exactly, run) -> None:
    code, text = fault("read_only", 6, run, *LONG)
    assert code == 1 and "read-only" in text and "Traceback" not in text, text
    assert newest_complete(run)[0] == run / "checkpoint-4" and not (run / "staging").exists()
    resumes_exactly(run, *LONG)


def test_of_two_starts_in_the_same_second_one_trains(start, golden, run) -> None:
    both = [start(run, *SAVES, log=f"{number}.log") for number in range(2)]
    assert sorted(command.end() for command in both) == [0, 2]
    (refused,) = (command for command in both if command.process.returncode == 2)
    assert "error: " in refused.text() and "Traceback" not in refused.text()
    assert results(run) == results(golden(*SAVES))


def test_a_run_continues_when_its_data_is_back(train, start, golden, tiny_data: Path, run, tmp_path: Path) -> None:
    """Truncated rows are tested in data/test_prepared.py."""
    own = tmp_path / "data"
    shutil.copytree(tiny_data, own)
    longer = (*SAVES, "--max_steps", 160, "--save_steps", 80)
    options = (*longer, "--dataset_dir", own)
    command = start(run, *options, warm=True)
    command.wait_until(lambda: command.step() >= 4)
    own.rename(tmp_path / "moved")  # the rows are mapped, so training continues
    time.sleep(1)
    command.process.send_signal(signal.SIGTERM)
    assert command.end() == 0 and status(run)["state"] == "stopped", command.text()
    before = newest_complete(run)[0]
    again = start(run, *options, log="again.log", warm=True)
    assert again.end() == 2 and "error: " in again.text() and "Traceback" not in again.text(), again.text()
    assert newest_complete(run)[0] == before
    (tmp_path / "moved").rename(own)
    train(run, *options)
    assert weights(run) == weights(golden(*longer))


def test_a_network_that_never_answers_does_not_stop_a_run(start, golden, silent, run, tmp_path: Path) -> None:
    (url, connections), began = silent, time.monotonic()
    network = {"HF_ENDPOINT": url, "HF_HUB_OFFLINE": "0", "WANDB_BASE_URL": url, "WANDB_API_KEY": "0" * 40}
    network["WANDB_INIT_TIMEOUT"] = "4"
    command = start(run, *SAVES, "--report_to", "wandb", HOME=str(tmp_path), **network)
    assert command.end(300) == 0, command.text()
    assert losses(run) == losses(golden(*SAVES)) and time.monotonic() - began < 240
    assert connections


def test_a_run_continues_if_its_supervisor_is_killed(start, golden, run) -> None:
    options = (*SAVES, "--max_steps", 250, "--save_steps", 20)
    supervised = ("python", "-m", "gpt2_repro.supervise", "--", sys.executable)
    command = start(run, *options, launcher=supervised)
    command.wait_until(lambda: newest_complete(run)[0])
    left = psutil.Process(command.process.pid).children(recursive=True)
    command.process.kill()
    command.end()
    # The run continues, and holds the lock of its directory until its end.
    refused = start(run, *options, log="refused.log", warm=True)
    assert refused.end() == 2 and "in use" in refused.text()
    _, alive = psutil.wait_procs(left, timeout=240)
    assert not alive and status(run)["state"] == "complete"
    assert results(run) == results(golden(*options))


def test_output_to_a_full_disk_does_not_end_a_command(golden, tiny_recipe: Path, tmp_path: Path) -> None:
    supervised = ("python", "-m", "gpt2_repro.supervise", "--", sys.executable)
    train = ("train.py", tiny_recipe, *SAVES, "--output_dir")
    prepare = ("prepare_data.py", tiny_recipe, "--dataset_dir", tmp_path / "data")
    commands = [("launch", 2, *train, tmp_path / "two"), (*supervised, *train, tmp_path / "one"), ("python", *prepare)]
    for words in commands:
        # 120: the launcher could not print a message of its own.
        assert start_cold(words, {}, Path("/dev/full")).wait(240) in (0, 120 * (words[0] == "launch")), words
    assert status(tmp_path / "two")["state"] == "complete" and results(tmp_path / "one") == results(golden(*SAVES))


def test_memory_trials_run_the_real_command(tiny_recipe: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    """`preflight --memory` reduces the micro-batch size until train.py succeeds."""
    (tmp_path / "train.py").symlink_to(ROOT / "tests" / "faults" / "faulty_train.py")
    fault = {"FAULT": "small_device", "FAULT_AT": "0", "FAULT_RANK": "0", "FAULT_MARK": str(tmp_path / "mark")}
    for name, value in fault.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(preflight, "TRAINING", [str(tmp_path / "train.py")])
    with pytest.raises(SystemExit) as end:
        options = ("--memory", "--per_device_train_batch_size", "2", "--sync_to", str(tmp_path / "place"))
        preflight.main([str(tiny_recipe), *options])
    out, err = capsys.readouterr()
    assert not end.value.code and "✓ memory           fits: --per_device_train_batch_size 1\n" in out, err
    assert not (tmp_path / "place").exists()  # the trials are not copied
