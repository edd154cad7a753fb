"""Training on two machines: two network namespaces of Linux, each with its own host name and /etc/hosts.

As on Debian and Ubuntu, the name of each machine stands for 127.0.1.1 on this machine.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.commands import ENVIRONMENT, ROOT
from tests.faults.runs import losses, status


pytestmark = pytest.mark.slow

ADDRESSES = ("10.213.77.1", "10.213.77.2")
# The arguments are HOSTNAME HOSTS PRIVATE PUBLIC COMMAND. Run the command with this host name and this /etc/hosts.
# PRIVATE is "" or a folder that the command sees as PUBLIC. Only the command sees the mounts, which end with it.
ENTER = """
set -e
hostname "$1"
mount --make-rprivate /
mount --bind "$2" /etc/hosts
if [ -n "$3" ]; then mount --bind "$3" "$4"; fi
shift 4
exec "$@"
"""


def ip(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *map(str, words)], capture_output=True, text=True)


class Machine:
    """A network namespace that runs one launcher at a time."""

    def __init__(self, rank: int, folder: Path) -> None:
        self.rank = rank
        self.name = f"gpt2-{os.getpid()}-{rank}"
        self.output = folder / f"machine-{rank}.log"
        self.hosts = folder / f"hosts-{rank}"
        self.hosts.write_text(f"127.0.0.1 localhost\n127.0.1.1 {self.name}\n", encoding="utf-8")
        self.process: subprocess.Popen[str] | None = None

    def set_up(self) -> None:
        """Set up the network of the namespace, which exists."""
        assert ip("-n", self.name, "link", "set", "lo", "up").returncode == 0
        assert ip("-n", self.name, "address", "add", f"{ADDRESSES[self.rank]}/24", "dev", "eth0").returncode == 0
        assert ip("-n", self.name, "link", "set", "eth0", "up").returncode == 0

    def set_link(self, state: str) -> None:
        assert ip("-n", self.name, "link", "set", "eth0", state).returncode == 0

    def start(
        self, words: list[object], processes: int, private: Path | None, public: Path, machines: int = 2
    ) -> None:
        """Start the launcher of this machine. It sees the folder `private` as `public`."""
        launcher = [sys.executable, "-m", "accelerate.commands.launch"]
        launcher += ["--config_file", "accelerate_configs/zero1_multinode.yaml", "--machine_rank", self.rank]
        launcher += ["--main_process_ip", ADDRESSES[0], "--num_machines", machines, "--num_processes", processes]
        entry = ["ip", "netns", "exec", self.name, "unshare", "--uts", "--mount", "bash", "-c", ENTER, "bash"]
        entry += [self.name, self.hosts, private or "", public]
        command = [str(word) for word in [*entry, *launcher, *words]]
        with self.output.open("w", encoding="utf-8") as output:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=os.environ | ENVIRONMENT,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                text=True,
                start_new_session=True,
            )

    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def end(self, timeout: float = 300) -> int:
        assert self.process is not None
        return self.process.wait(timeout)

    def text(self) -> str:
        return self.output.read_text(errors="replace", encoding="utf-8")

    def processes(self) -> list[int]:
        """Return the process ids of all processes of this machine."""
        return [int(number) for number in ip("netns", "pids", self.name).stdout.split()]

    def kill(self) -> None:
        """Kill all processes of this machine, such as its launcher and the writer of checkpoints."""
        running = self.processes()
        while running:
            for number in running:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(number, signal.SIGKILL)
            time.sleep(0.05)
            running = self.processes()
        if self.process is not None:
            self.process.wait()


class Machines:
    """Two machines with a link between them."""

    def __init__(self, folder: Path, recipe: Path) -> None:
        self.both = (Machine(0, folder), Machine(1, folder))
        self.recipe = recipe

    def start(self, run: Path, *options: object, processes: int = 4, private: tuple[Path, Path] | None = None) -> None:
        words = ["train.py", self.recipe, "--output_dir", run, "--disable_tqdm", "true", *options]
        for machine in self.both:
            own = private[machine.rank] if private else None
            machine.start(words, processes, own, run.parent)

    def train(self, run: Path, *options: object, processes: int = 4) -> None:
        self.start(run, *options, processes=processes)
        codes = [machine.end() for machine in self.both]
        assert codes == [0, 0], self.text()

    def train_on_one(self, run: Path, *options: object) -> None:
        """Train with one process on the first machine, without the second one."""
        machine = self.both[0]
        machine.start(["train.py", self.recipe, "--output_dir", run, *options], 1, None, run.parent, machines=1)
        assert machine.end() == 0, self.text()

    def text(self) -> str:
        return "".join(f"--- machine {machine.rank}\n{machine.text()[-6000:]}\n" for machine in self.both)

    def wait_for(self, file: Path, timeout: float = 300) -> None:
        """Wait until a file exists. Both launchers must run until then."""
        deadline = time.monotonic() + timeout
        while not file.is_file():
            assert time.monotonic() < deadline, self.text()
            assert all(machine.is_running() for machine in self.both), self.text()
            time.sleep(0.02)


@pytest.fixture
def machines(tmp_path: Path, tiny_recipe: Path) -> Iterator[Machines]:
    """Create two machines. Skip the test if this is not allowed."""
    if sys.platform != "linux" or shutil.which("ip") is None or shutil.which("unshare") is None:
        pytest.skip("Two machines need Linux with iproute2 and util-linux.")
    machines = Machines(tmp_path, tiny_recipe)
    try:
        for machine in machines.both:
            added = ip("netns", "add", machine.name)
            if added.returncode:
                pytest.skip(f"Network namespaces are not allowed: {added.stderr.strip()}")
        first, second = (machine.name for machine in machines.both)
        added = ip("link", "add", "eth0", "netns", first, "type", "veth", "peer", "name", "eth0", "netns", second)
        if added.returncode:
            pytest.skip(f"Links between namespaces are not allowed: {added.stderr.strip()}")
        for machine in machines.both:
            machine.set_up()
        yield machines
    finally:
        for machine in machines.both:
            machine.kill()
            ip("netns", "delete", machine.name)  # and its link


def losses_by_step(run: Path) -> dict[tuple[int, str], float]:
    """Return the losses by step and kind."""
    return {(step, kind): loss for step, kind, loss in losses(run)}


SMALL = ("--per_device_train_batch_size", 2)


def test_two_machines_train_as_one_does(machines: Machines, golden, run: Path) -> None:
    machines.train(run, *SMALL)
    assert losses_by_step(run) == pytest.approx(losses_by_step(golden(*SMALL, launcher=("launch", 4))), abs=1e-6)
    assert status(run)["state"] == "complete"


def test_the_number_of_processes_of_both_machines_can_change(machines: Machines, golden, run: Path) -> None:
    """A run continues with one process on each machine, then with two, then on one machine."""
    for processes, last in ((2, 2), (4, 6)):
        machines.train(run, "--per_device_train_batch_size", 2, "--stop_at_step", last, processes=processes)
        assert status(run)["step"] == last, machines.text()
    machines.train_on_one(run)
    expected = losses_by_step(golden(*SMALL, launcher=("launch", 4)))
    measured = losses_by_step(run)
    for step in (2, 6):
        del measured[step, "eval_loss"]  # a run also validates when it stops
    assert measured == pytest.approx(expected, abs=1e-5)


LONG = ("--per_device_train_batch_size", 4, "--max_steps", 300, "--save_steps", 20, "--eval_steps", 150)
HANG_SECONDS = 20


def kill_first(machines: Machines) -> list[Machine]:
    machines.both[0].kill()
    return [machines.both[1]]


def kill_second(machines: Machines) -> list[Machine]:
    machines.both[1].kill()
    return [machines.both[0]]


def cut_the_link(machines: Machines) -> list[Machine]:
    machines.both[1].set_link("down")
    return list(machines.both)


@pytest.mark.parametrize("fault", [kill_first, kill_second, cut_the_link])
def test_a_machine_that_is_lost_ends_the_other(
    fault: Callable[[Machines], list[Machine]], machines: Machines, golden, run: Path
) -> None:
    """The others end with an error and their stacks. The same commands continue the run."""
    options = (*LONG, "--hang_timeout", HANG_SECONDS)
    machines.start(run, *options, processes=2)
    machines.wait_for(run / "checkpoint-20" / "manifest.json")
    remaining = fault(machines)
    for machine in remaining:
        assert machine.end(HANG_SECONDS + 60) != 0, machines.text()
    console = (run / "console.log").read_text(encoding="utf-8")
    assert 'File "' in console  # a stack
    if fault is cut_the_link:
        assert console.count("Timeout (0:00:20)!") == 2
    for machine in remaining:
        machine.kill()  # its writer
    ended = status(run)
    assert ended["state"] == "failed" and ended["reason"], ended
    assert ended["step"] < 300
    machines.both[1].set_link("up")
    machines.train(run, *options, processes=2)
    assert "resuming" in machines.both[0].text().lower()
    assert losses_by_step(run) == pytest.approx(losses_by_step(golden(*LONG, launcher=("launch", 2))), abs=1e-6)


def test_machines_without_a_shared_folder_are_refused(machines: Machines, tiny_data: Path, tmp_path: Path) -> None:
    """Each machine has its own data and its own run directory at the same paths."""
    public = tmp_path / "runs"
    private = (tmp_path / "private-0", tmp_path / "private-1")
    for folder in (public, *private):
        folder.mkdir()
    for folder in private:
        shutil.copytree(tiny_data, folder / "data")
    options = ("--dataset_dir", public / "data", *SMALL)
    machines.start(public / "run", *options, private=private)
    codes = [machine.end() for machine in machines.both]
    assert 0 not in codes, machines.text()
    for machine in machines.both:
        lines = [line for line in machine.text().splitlines() if line.startswith("error: ")]
        assert len(lines) == 1 and "--output_dir" in lines[0], machines.text()
    for folder in private:
        assert [path.name for path in folder.iterdir()] == ["data"]
