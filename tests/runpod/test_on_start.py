"""on_start.sh sets the deadline, sets up the pod, and always exits with 0."""

import os
import signal

import pytest

from tests.runpod.conftest import wait_for
from tests.runpod.test_stop_pod import TERMINATE


def log(pod) -> str:
    return pod.log("on_start.log")


def test_a_second_start_installs_nothing(pod) -> None:
    """A second start of a pod uses the environment that the first start installed."""
    assert pod.run("on_start.sh") == (0, "")
    wait_for(lambda: pod.calls("python -m gpt2_repro.preflight"))
    first = pod.calls()
    assert any(call.startswith("python -m venv --system-site-packages") for call in first) and "ready: ." in log(pod)
    # The torch of the image is kept.
    (constraints,) = pod.folder.glob("gpt2-venv-*/constraints.txt")
    assert constraints.read_text(encoding="utf-8") == "torch==2.9.1+cu128\n"
    assert any(f"--constraint {constraints}" in call for call in first if call.endswith("/requirements.txt"))
    settings = (pod.folder / "gpt2.env").read_text(encoding="utf-8")
    assert all(name in settings for name in ("HF_HOME", "TORCHINDUCTOR_CACHE_DIR", "PATH="))
    # The next start does not wait for its preflight, which hangs here and runs in the background.
    assert pod.run("on_start.sh", SLOW_PREFLIGHT="1") == (0, "")
    wait_for(lambda: len(pod.calls("python -m gpt2_repro.preflight")) == 2)
    again = pod.calls()[len(first) :]
    assert not any(word in call for call in again for word in ("pip install", "-m venv"))


@pytest.mark.parametrize("fails", [{"INSTALL": "1"}, {"NO_VENV": "1", "HOME": None}])
def test_a_start_that_fails_does_not_fail_the_container(pod, fails: dict[str, str | None]) -> None:
    assert pod.run("on_start.sh", **fails) == (0, "")
    assert "COULD NOT BE INSTALLED" in log(pod) and "ready" not in log(pod) and "unbound" not in log(pod)
    assert not any("preflight" in call for call in pod.calls())
    assert not list(pod.folder.glob("gpt2-venv-*/.ok")) and not pod.calls("runpodctl")
    assert pod.run("on_start.sh") == (0, "") and "ready: ." in log(pod)  # the next start repairs it


@pytest.mark.parametrize(("hours", "seconds"), [("2", 7200), ("four", 86400)])
def test_the_deadline_is_armed_first_and_once(pod, hours: str, seconds: int) -> None:
    for _ in range(2):
        assert pod.run("on_start.sh", POD_HOURS=hours, NO_VENV="1") == (0, "")
    assert log(pod).index(" hours") < log(pod).index("COULD NOT BE INSTALLED")
    assert len(pod.processes(f"deadline.sh --armed start {seconds}")) == 1


@pytest.mark.parametrize(
    ("command", "variables", "stops"),
    [("exit 2", {}, True), ("true", {}, False), ("false # --keep", {}, False), ("true", {"NO_VENV": "1"}, True)],
)
def test_a_command_that_fails_stops_the_pod(pod, command: str, variables: dict[str, str], stops: bool) -> None:
    options = {"START_GRACE": "0.5", "RUNPOD_VOLUME_ID": "volume", "STUB_tmux": "1"}
    pod.start("on_start.sh", AUTO_RUN=command, **options, **variables)
    if stops:
        wait_for(lambda: 30 in pod.sleeps())
        assert not pod.calls("runpodctl")
        for process in pod.processes("deadline.sh"):
            os.kill(process, signal.SIGKILL)  # it would stop the pod too
        pod.wake()
        wait_for(lambda: set(TERMINATE) <= set(pod.calls()))
    else:
        wait_for(lambda: "ended with exit code" in pod.log("auto_run.log") and not pod.processes("auto_run.sh"))
        assert 30 not in pod.sleeps() and not pod.calls("runpodctl")
