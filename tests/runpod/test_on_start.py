"""A pod is set up on every start, within a deadline, and never fails its container."""

import json
import os
import re
import stat
import subprocess
import time

import pytest

from tests.runpod.conftest import wait_for
from tests.runpod.test_stop_pod import TERMINATE


def log(pod) -> str:
    return pod.log("on_start.log")


def settings(pod, name: str) -> str:
    """What a shell that reads the settings has in this variable."""
    words = ["bash", "-uc", f'. "$HOME/gpt2.env" && printf %s "${name}"']
    environment = {"PATH": os.environ["PATH"], "HOME": str(pod.folder)}
    return subprocess.run(words, env=environment, text=True, capture_output=True, check=True).stdout


def test_a_second_start_installs_nothing_and_takes_seconds(pod) -> None:
    assert pod.run("on_start.sh") == (0, "")
    first = pod.calls()
    assert any(call.startswith("python -m venv --system-site-packages") for call in first)
    assert "no wheel fits, attention is SDPA" in log(pod) and "ready: ." in log(pod)
    began = time.monotonic()
    assert pod.run("on_start.sh") == (0, "")
    assert time.monotonic() - began < 5
    again = pod.calls()[len(first) :]
    assert not any(word in call for call in again for word in ("pip install", "-m venv"))


def test_the_images_torch_is_kept(pod) -> None:
    pod.run("on_start.sh")
    (constraints,) = (pod.workspace / "venvs").glob("*/constraints.txt")
    assert constraints.read_text() == "torch==2.9.1+cu128\n"
    (install,) = [call for call in pod.calls() if call.endswith("/requirements.txt")]
    assert f"--constraint {constraints}" in install


def test_a_shell_has_the_environment_and_its_caches(pod) -> None:
    """In a workspace with a space; a HOME of its own, because the next pod on the volume may have another image."""
    pod.run("on_start.sh")
    assert re.match(rf"{pod.workspace}/venvs/py312-torch2\.9\.1\+cu128-\w+/bin:", settings(pod, "PATH"))
    assert settings(pod, "HF_HOME") == f"{pod.workspace}/.cache/huggingface"
    assert settings(pod, "TORCHINDUCTOR_CACHE_DIR") == f"{pod.workspace}/.cache/inductor"
    # Many small files: in the container.
    assert settings(pod, "HF_DATASETS_CACHE") == f"{pod.folder}/.cache/huggingface/datasets"


def test_without_a_home_it_is_that_of_root(pod) -> None:
    code, said = pod.run("on_start.sh", NO_VENV="1", HOME=None)
    assert (code, said) == (0, "") and "unbound" not in log(pod) and "COULD NOT BE INSTALLED" in log(pod)


def test_each_start_looks_at_its_machine_and_waits_for_nothing(pod) -> None:
    def looks() -> int:
        return pod.calls().count("python -m gpt2_repro.preflight")

    for number in (1, 2):
        began = time.monotonic()
        assert pod.run("on_start.sh", PREFLIGHT_SECONDS="6")[0] == 0
        assert number == 1 or time.monotonic() - began < 5
        wait_for(lambda number=number: looks() == number)


def test_a_flash_attn_wheel_is_trusted_once_it_is_imported(pod) -> None:
    pod.run("on_start.sh")  # installed, and not importable
    assert any("pip uninstall" in call and "flash-attn" in call for call in pod.calls())
    # Nothing is compiled: what is installed besides the requirements is that wheel.
    installed = [call for call in pod.calls() if "pip install" in call]
    assert [call.rpartition(" ")[2].rpartition("/")[2] for call in installed] == ["requirements.txt", "flash_attn.whl"]
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


@pytest.mark.parametrize("fails", ["NO_VENV", "INSTALL"])
def test_a_start_that_fails_does_not_fail_the_container(pod, fails: str) -> None:
    assert pod.run("on_start.sh", **{fails: "1"}) == (0, "")
    assert "THE ENVIRONMENT COULD NOT BE INSTALLED" in log(pod) and "ready" not in log(pod)
    assert not any("flash_attn" in call or "preflight" in call for call in pod.calls())
    assert not list((pod.workspace / "venvs").glob("*/.ok")) and not pod.calls("runpodctl")
    assert pod.run("on_start.sh") == (0, "") and "ready: ." in log(pod)  # and the next start makes it good


def test_two_at_once_make_one_environment(pod) -> None:
    both = [pod.start("on_start.sh", VENV_SECONDS="0.5") for _ in range(2)]
    assert [process.wait(30) for process in both] == [0, 0]
    assert len(pod.calls("python -m venv")) == 1 and log(pod).count("ready: .") == 2


def test_the_deadline_is_armed_first_and_once(pod) -> None:
    variables = {"POD_HOURS": "2", "NO_VENV": "1"}
    for _ in range(2):
        assert pod.run("on_start.sh", **variables)[0] == 0
    said = log(pod)
    assert said.count("the pod is stopped in 2 hours at the latest") == 1 and "is armed already" in said
    assert said.index("at the latest") < said.index("installing the environment")
    assert len(pod.processes("deadline.sh --armed start 7200")) == 1


def test_the_deadline_needs_no_volume(pod) -> None:
    pod.workspace.write_text("a file")
    assert pod.run("on_start.sh", POD_HOURS="1") == (0, "")
    said = (pod.folder / "on_start.log").read_text()
    assert "the pod is stopped in 1 hours" in said and "COULD NOT BE INSTALLED" in said
    assert pod.processes("deadline.sh --armed start 3600")


@pytest.mark.parametrize("variables", [{"POD_HOURS": "four"}, {"AUTO_RUN": "true"}])
def test_hours_that_are_no_number_are_24(pod, variables: dict[str, str]) -> None:
    """And so are none, for what runs by itself."""
    pod.run("on_start.sh", **variables)
    assert "WHICH IS NO NUMBER OF HOURS: 24 are taken" in log(pod)
    assert pod.processes("deadline.sh --armed start 86400")


COMMAND = "echo 'a b' >>\"$TMPDIR/ran\"; echo secret-of-mine"


def test_a_command_is_started_in_tmux_once(pod) -> None:
    pod.run("on_start.sh", AUTO_RUN=COMMAND, STUB_tmux="0")
    assert not pod.calls("tmux new-session")  # the session is there
    (pod.stubs / "tmux").write_text(
        '#!/bin/bash\necho "tmux $1" >>"$CALLS"\n[[ $1 == new-session ]] && bash -c "${!#}" </dev/null >"$TMPDIR/pane"\n'
    )
    pod.run("on_start.sh", AUTO_RUN=COMMAND)
    assert pod.calls("tmux")[-1] == "tmux new-session" and (pod.folder / "ran").read_text() == "a b\n"
    assert (pod.folder / "pane").read_text() == "secret-of-mine\nAUTO_RUN ended with exit code 0\n"
    assert "secret-of-mine" not in log(pod) and "tmux attach -t run" in log(pod)
    script = pod.folder / "auto_run.sh"
    assert stat.S_IMODE(script.stat().st_mode) == 0o600 and script.read_text().splitlines()[1] == COMMAND


def test_without_tmux_the_command_is_started_all_the_same(pod) -> None:
    began = pod.folder / "began"
    for _ in range(2):
        pod.run("on_start.sh", AUTO_RUN='echo $$ >>"$TMPDIR/began"; sleep 30', STUB_tmux="1")
        wait_for(lambda: began.exists() and began.read_text())
    assert log(pod).count("TMUX FAILED") == 2
    wait_for(lambda: len(pod.processes("flock")) == 1)  # the second one has found the first
    (process,) = began.read_text().split()
    assert os.getsid(int(process)) not in (os.getsid(0), int(process))  # that of flock, which nothing else is in


def test_where_the_command_cannot_run_the_pod_is_stopped(pod) -> None:
    began = time.monotonic()
    pod.run(
        "on_start.sh", AUTO_RUN="true", NO_VENV="1", START_GRACE="0.02", RUNPOD_VOLUME_ID="volume"
    )  # 1.2 s, rounded
    assert time.monotonic() - began > 1 and pod.calls()[-4:] == TERMINATE and not pod.calls("tmux")
    assert "AUTO_RUN cannot start: the pod is stopped in 0.02 minutes" in log(pod)
    assert json.loads(TERMINATE[2].split("--data ")[1].split()[0]) == {"action": "terminate"}
