"""Wrong options end a script with an error and exit code 2, without side effects."""

import shlex

import pytest

from tests.runpod.conftest import ROOT


RENT = "create_pod.sh --yes --gpu A40 --hours 4"
RUN = "run_and_stop.sh --hours 1"
SCRIPTS = ("create_pod.sh", "deadline.sh", "on_start.sh", "run_and_stop.sh", "stop_pod.sh", "sync.sh")


@pytest.mark.parametrize(
    ("typed", "named"),
    [
        ("create_pod.sh --yes --n 8 --volume v --hours 4", "--gpu"),
        ("create_pod.sh --yes --gpu A40 --volume v", "--hours"),
        ("create_pod.sh --yes --cpu --volume v --hours four", "--hours"),
        ("create_pod.sh --yes --cpu --hours 4 --volume_gb 10", "--volume ID"),
        ("create_pod.sh --yes --gpus 8", "--gpus"),
        (RENT, "--volume"),
        (f"{RENT} --volume v --volume_gb 10", "--volume_gb"),
        (f"{RENT} --volume_gb much", "--volume_gb"),
        (f"{RENT} --volume v --n 1.5", "--n"),
        ("run_and_stop.sh -- train.py", "--hours"),
        ("run_and_stop.sh --hours four -- train.py", "--hours"),
        ("run_and_stop.sh --hour 1 -- train.py", "--hour"),
        ("run_and_stop.sh --hours", "value"),
        (RUN, "command"),
        (f"{RUN} --grace long -- train.py", "--grace"),
        (f"{RUN} --keep -- train.py", "--hours"),
        ("sync.sh", "hf://buckets/"),
        *((f"create_pod.sh --yes --gpu A40 --volume v --hours {hours}", "--hours") for hours in (0, -1, "1e3", 720.5)),
        *((f"{script} --nonsense", "--nonsense") for script in (*SCRIPTS, "deadline.sh 1", "sync.sh run")),
        ("../cloud/hf_jobs.sh me/mine https://x --nonsense", "--nonsense"),
        ("sync.sh --check hf://me/mine", "hf://me/mine"),
        ("sync.sh no-such-run host:", "no-such-run"),
        ("stop_pod.sh stop halt", "'halt'"),
        *((f"deadline.sh '{hours}'", f"'{hours}'") for hours in ("four", "", "0", "0.0", "-1", "1e3", "4h", ".")),
    ],
)
def test_a_mistake_is_named(pod, typed: str, named: str) -> None:
    code, said = pod.run(*shlex.split(typed))
    assert code == 2 and "error: " in said and named in said
    assert pod.calls() == [] and not pod.processes("deadline.sh")


@pytest.mark.parametrize("typed", [f"{RUN} --help -- train.py", "sync.sh run -h", "../cloud/hf_jobs.sh --help"])
def test_help_is_the_comment_at_the_top_and_does_nothing(pod, typed: str) -> None:
    scripts = [path.name for path in (ROOT / "runpod").glob("*.sh")]
    for words in (shlex.split(typed), *([script, "--help"] for script in scripts)):
        code, said = pod.run(*words)
        top = (ROOT / "runpod" / words[0]).read_text(encoding="utf-8").partition("\n\n")[0].splitlines()[1]
        assert code == 0 and said.startswith(top.removeprefix("# ")) and "set -" not in said
    assert pod.calls() == [] and not pod.processes("deadline.sh") and not pod.workspace.exists()


@pytest.mark.parametrize(
    ("typed", "named"), [(f"{RUN} -- train.py", "--keep"), ("stop_pod.sh", "POD_ID"), ("deadline.sh 1", "POD_ID")]
)
def test_a_machine_that_is_no_pod_is_not_stopped(pod, typed: str, named: str) -> None:
    code, said = pod.run(*shlex.split(typed), RUNPOD_POD_ID=None)
    assert code == 2 and named in said and pod.calls() == [] and not pod.processes("deadline.sh")
