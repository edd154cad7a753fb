"""Training works on two machines, simulated by two launchers on one machine."""

import json
import socket
from pathlib import Path

import pytest

from tests.commands import kill_all
from tests.warm import start_warm


pytestmark = pytest.mark.slow


def test_two_machines_match_one_machine(train, events, tiny_recipe: Path, tmp_path: Path) -> None:
    rows = ("--per_device_train_batch_size", 4)
    straight, run = train(tmp_path / "one", *rows), tmp_path / "two"
    with socket.socket() as free:  # immediately before the launch, because another process may take the port
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    config = "accelerate_configs/zero1_multinode.yaml"
    groups = []
    for rank in (0, 1):
        machine = ("--machine_rank", rank, "--main_process_ip", "127.0.0.1", "--main_process_port", port)
        words = ("-m", "accelerate.commands.launch", "--config_file", config, "--num_processes", 2, *machine)
        command = ("python", *words, "train.py", tiny_recipe, *rows, "--output_dir", run)
        groups.append(start_warm(command, {}, tmp_path / f"log{rank}"))
    try:
        codes = [group.wait(120) for group in groups]
    finally:
        for group in groups:
            kill_all(group.pid)
    assert codes == [0, 0], (tmp_path / "log0").read_text(encoding="utf-8")[-2000:] + (tmp_path / "log1").read_text(
        encoding="utf-8"
    )[-2000:]
    environment = json.loads((run / "environment.json").read_text(encoding="utf-8"))
    assert environment["engine"]["zero_stage"] == 1 and environment["plan"]["num_processes"] == 2
    losses = [{event["step"]: event["loss"] for event in events(each) if "loss" in event} for each in (run, straight)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
