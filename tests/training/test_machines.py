"""Training works on two machines, simulated by two launchers on one machine.

`faults/test_two_machines.py` has two machines with their own networks.
"""

import json
import os
import signal
import socket
import subprocess
import time
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gpt2_repro import ranks
from gpt2_repro.errors import UserError
from gpt2_repro.run_record import RunRecord
from gpt2_repro.training import launch_checks
from gpt2_repro.training.run import record_failure
from tests.commands import kill_all
from tests.sections import ROOT
from tests.warm import start_warm


ROWS = ("--per_device_train_batch_size", 4)


def on_two_machines(
    recipe: Path, run: Path, logs: Path, *options: object, second: tuple = (), script: str = "train.py", **environment
) -> list[int]:
    """Train with two launchers, and return their exit codes. The second one also gets the options `second`."""
    with socket.socket() as free:  # immediately before the launch, because another process may take the port
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    config, groups = "accelerate_configs/zero1_multinode.yaml", []
    for rank in (0, 1):
        machine = ("--machine_rank", rank, "--main_process_ip", "127.0.0.1", "--main_process_port", port)
        words = ("-m", "accelerate.commands.launch", "--config_file", config, "--num_processes", 2, *machine)
        command = ("python", *words, script, recipe, "--output_dir", run, *options, *(second if rank else ()))
        groups.append(start_warm(command, environment, logs / f"log{rank}"))
    try:
        return [group.wait(120) for group in groups]
    finally:
        for group in groups:
            kill_all(group.pid)


@pytest.mark.slow
def test_two_machines_match_one_machine(train, events, tiny_recipe: Path, tmp_path: Path) -> None:
    straight, run = train(tmp_path / "one", *ROWS), tmp_path / "two"
    codes = on_two_machines(tiny_recipe, run, tmp_path, *ROWS)
    assert codes == [0, 0], [(tmp_path / f"log{rank}").read_text(encoding="utf-8")[-2000:] for rank in (0, 1)]
    environment = json.loads((run / "environment.json").read_text(encoding="utf-8"))
    assert environment["engine"]["zero_stage"] == 1 and environment["plan"]["num_processes"] == 2
    losses = [{event["step"]: event["loss"] for event in events(each) if "loss" in event} for each in (run, straight)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


@pytest.mark.slow
def test_different_settings_and_a_mistake_that_rank_0_finds_end_all_machines(train, tiny_recipe, tmp_path) -> None:
    run, change = tmp_path / "run", ("--learning_rate", 0.05)
    # Under ZeRO-1, each rank would update its part of the weights with its own rate.
    codes = on_two_machines(tiny_recipe, run, tmp_path, *ROWS, second=change)
    assert 0 not in codes and "learning_rate" in (tmp_path / "log0").read_text(encoding="utf-8") and not run.exists()
    train(run, *ROWS, "--stop_at_step", 2)
    codes = on_two_machines(tiny_recipe, run, tmp_path, *ROWS, *change)
    logs = [(tmp_path / f"log{rank}").read_text(encoding="utf-8") for rank in (0, 1)]
    assert 0 not in codes and all("learning_rate" in log for log in logs)


def test_machines_that_do_not_share_the_run_directory_are_refused(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(ranks.time, "sleep", lambda _: None)
    other = torch.tensor([zlib.crc32(b"")])
    monkeypatch.setattr(ranks, "gather", lambda own: torch.stack([own, other]))
    ranks.check_shared(tmp_path / "missing_on_both")
    (tmp_path / "run_status.json").write_text("{}", encoding="utf-8")
    with pytest.raises(UserError, match="--output_dir"):
        ranks.check_shared(tmp_path / "run_status.json")


# NCCL takes prefixes, gloo complete names.
@pytest.mark.parametrize(("wanted", "chosen"), [("ens", "ens1"), ("=ens12", "ens12"), ("^docker", None), ("", None)])
def test_gloo_takes_the_network_interface_of_nccl(wanted: str, chosen: str | None, monkeypatch) -> None:
    interfaces = [(1, "lo"), (2, "eth0"), (3, "ens12"), (4, "ens1")]
    monkeypatch.setattr(launch_checks.socket, "if_nameindex", lambda: interfaces)
    for own, result in (({}, chosen), ({"GLOO_SOCKET_IFNAME": "eth0"}, "eth0")):
        monkeypatch.setattr(os, "environ", {"NCCL_SOCKET_IFNAME": wanted} | own)
        launch_checks.choose_gloo_interface()
        assert os.environ.get("GLOO_SOCKET_IFNAME") == result


def address(number: str) -> SimpleNamespace:
    return SimpleNamespace(family=socket.AF_INET6 if ":" in number else socket.AF_INET, address=number)


LO = {"lo": [address("127.0.0.1"), address("::1")]}
ETH0 = {"eth0": [address("10.0.0.5"), address("fe80::5%eth0")]}
IB0 = {"ib0": [address("10.9.0.5")]}
TO_ANYWHERE = {launch_checks.ANYWHERE: "10.0.0.5"}


@pytest.mark.parametrize(
    ("interfaces", "routes", "chosen"),
    [
        (LO | ETH0 | IB0, {"master": "10.9.0.5"} | TO_ANYWHERE, "ib0"),
        (LO | ETH0 | IB0, {"master": "fe80::5"} | TO_ANYWHERE, "eth0"),
        # The first machine, whose name leads to 127.0.1.1.
        (LO | ETH0 | IB0, {"master": "127.0.0.1"} | TO_ANYWHERE, "eth0"),
        (LO | IB0, {"master": "127.0.0.1"}, "ib0"),  # no default route
        (LO | ETH0 | IB0, {"master": "127.0.0.1"}, None),
        (LO | ETH0, {}, "eth0"),  # an unknown name
        (LO, {"master": "127.0.0.1"}, None),
    ],
)
def test_gloo_takes_the_interface_that_leads_to_the_first_machine(interfaces, routes, chosen, monkeypatch) -> None:
    monkeypatch.setattr(launch_checks.psutil, "net_if_addrs", lambda: interfaces)
    monkeypatch.setattr(launch_checks, "_own_address", routes.get)
    several = {"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8", "MASTER_ADDR": "master"}
    for variables, result in (
        (several, chosen),
        (several | {"LOCAL_WORLD_SIZE": "16"}, None),
        (several | {"GLOO_SOCKET_IFNAME": "own"}, "own"),
    ):
        monkeypatch.setattr(os, "environ", dict(variables))
        launch_checks.choose_gloo_interface()
        assert os.environ.get("GLOO_SOCKET_IFNAME") == result


def test_the_own_address_is_that_of_the_route() -> None:
    assert launch_checks._own_address("127.0.0.1") == "127.0.0.1"
    assert launch_checks._own_address("no.such.host.invalid") is None


@pytest.mark.parametrize(
    ("rank", "local_rank", "on_machine", "state"),
    [
        (0, 0, 4, "recorded"),
        (0, 0, 2, "recorded"),
        (1, 1, 2, "running"),
        (1, 1, 4, "running"),
        (2, 0, 2, "failed"),
        (3, 1, 2, "running"),
    ],
)
def test_each_machine_records_a_failure(
    rank: int, local_rank: int, on_machine: int, state: str, tmp_path: Path, monkeypatch
) -> None:
    """The machine of rank 0 may be lost."""
    for name, value in (("RANK", rank), ("WORLD_SIZE", 4), ("LOCAL_WORLD_SIZE", on_machine)):
        monkeypatch.setenv(name, str(value))
    run = RunRecord(tmp_path / "run")
    run.write_status("running")
    trainer: Any = SimpleNamespace(
        args=SimpleNamespace(local_process_index=local_rank),
        run=run,
        record=lambda state, reason: run.write_status("recorded", reason=reason),
    )
    record_failure(trainer, "failed", "a refused start")
    assert run.status().state == "running", "another job trains the run"
    run.join()
    record_failure(trainer, "failed", "a hang")
    assert run.status().state == state
    assert run.status().reason == (None if state == "running" else "a hang")


SLURM = {
    # Two machines, which start the same command.
    "srun": 'shift; for node in 0 1; do SLURM_NODEID=$node "$@" & jobs+=($!); done\n'
    'code=0; for job in "${jobs[@]}"; do wait "$job" || code=$?; done; exit "$code"',
    "scancel": 'echo "scancel $*" >>calls; kill -TERM $(cat pids)',
    "scontrol": 'case $1 in show) printf "%s\\n" node1 node2 ;; *) echo "scontrol $*" >>calls ;; esac',
    # The supervisor: it ends with CODE, or after SIGTERM.
    "python": 'printf -v line "%s|" "$@"; echo "$line" >>words\n[[ -z ${CODE:-} ]] || exit "$CODE"\n'
    'trap "exit 0" TERM; echo $$ >>pids; while :; do sleep 0.02; done',
}


@pytest.mark.parametrize("code", ["", "0", "1"])
def test_a_slurm_job_continues_in_a_new_job(code: str, tmp_path: Path) -> None:
    for name, text in SLURM.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{text}\n", encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_JOB_ID": "10007", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_NUM_NODES": "2"}
    slurm |= {"SLURM_GPUS_ON_NODE": "4", "CODE": code, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["bash", ROOT / "cloud" / "slurm.sbatch", "my recipe.yaml", "--max_hours", "2"]
    with subprocess.Popen(command, env=os.environ | slurm, cwd=tmp_path) as job:
        if not code:
            pids, deadline = tmp_path / "pids", time.monotonic() + 30
            while not pids.is_file() or pids.read_text(encoding="utf-8").count("\n") < 2:
                assert job.poll() is None and time.monotonic() < deadline
                time.sleep(0.02)
            job.send_signal(signal.SIGUSR1)  # as Slurm does before the time limit
        assert job.wait(30) == int(code or 0)
    calls = (tmp_path / "calls").read_text(encoding="utf-8").splitlines() if (tmp_path / "calls").exists() else []
    assert calls == ([] if code else ["scancel --signal=TERM 10007.0", "scontrol requeue 10007"])
    lines = [line.split("|")[:-1] for line in (tmp_path / "words").read_text(encoding="utf-8").splitlines()]
    options = [dict(zip(words, words[1:], strict=False)) for words in lines]
    ranks = {(each["--machine_rank"], each["--rdzv_conf"]) for each in options}
    assert ranks == {("0", "is_host=1"), ("1", "is_host=0")}
    expected = {"--num_machines": "2", "--num_processes": "8", "--rdzv_backend": "c10d"}
    expected |= {"--main_process_ip": "node1", "--main_process_port": "20007"}
    for words, each in zip(lines, options, strict=True):
        assert words[:3] == ["-m", "gpt2_repro.supervise", "--"] and expected.items() <= each.items()
        assert words[-4:] == ["train.py", "my recipe.yaml", "--max_hours", "2"]


@pytest.mark.parametrize(("has_group", "keys"), [(True, 2), (False, 0)])
def test_rank_0_tells_the_ranks_of_its_machine_why_it_ends(has_group: bool, keys: int, monkeypatch) -> None:
    """After the process group has started, they ignore the launcher's signal, and would wait for rank 0."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: has_group)
    written: list[str] = []
    store = SimpleNamespace(set=lambda key, value: written.append(key), wait=lambda keys, timeout: None)
    monkeypatch.setattr(ranks, "_store", lambda: store)

    def fail() -> None:
        raise UserError("a place cannot be written")

    with pytest.raises(UserError):
        ranks.decide(fail)
    assert len(written) == keys
