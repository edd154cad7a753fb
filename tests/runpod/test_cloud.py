"""The commands in runpod/README.md and cloud/ use existing scripts and options."""

import re
import shlex
import subprocess

import pytest
import yaml

from tests.runpod.conftest import KEY, PYTHON, ROOT, wait_for


def blocks(page: str) -> list[str]:
    return re.findall(
        r"^```bash\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL
    )


@pytest.mark.parametrize("page", ["runpod/README.md", "cloud/lambda.md"])
def test_what_the_pages_type_is_there(pod, page: str) -> None:
    commands = re.findall(r"bash runpod/(\w+\.sh)([^\n|]*)", (ROOT / page).read_text(encoding="utf-8"))
    assert commands
    for script, rest in commands:
        options = set(re.findall(r"(?<= )--\w+", rest.partition(" -- ")[0]))
        path = ROOT / "runpod" / script
        assert path.is_file() and options <= set(
            re.findall(r"(?<=^    )--\w+(?=\))", path.read_text(encoding="utf-8"), re.MULTILINE)
        )
        if script == "create_pod.sh" and options:
            assert pod.run(script, *shlex.split(rest, comments=True))[0] == 0, rest
    for block in blocks(page):
        assert subprocess.run(["bash", "-n"], input=block, text=True).returncode == 0


def test_a_job_of_the_hub_is_started_only_when_that_is_typed(pod) -> None:
    script, words = "../cloud/hf_jobs.sh", ("me/mine", "https://example.org/gpt2.git")
    code, said = pod.run(script, *words)
    assert code == 0 and "--yes" in said and pod.calls() == []
    command = shlex.split(said[: said.index("Nothing was started")].replace("\\\n", ""))
    assert "--flavor a100x8 --timeout 4h --secrets HF_TOKEN -v hf://buckets/me/mine:/bucket" in " ".join(command)
    (copy,) = re.findall(
        r"^#   hf sync \S+ (\S+)$", (ROOT / "cloud" / "hf_jobs.sh").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert f"--dataset_dir /bucket{copy.removeprefix('hf://buckets/USER/BUCKET')} " in command[-1]
    assert pod.run(script, *words, "--yes")[0] == 0 and pod.calls()[0].startswith("hf jobs run")
    assert pod.run(script)[0] == 2


def stage(pod, name: str, **variables: str) -> int:
    """Run the stage "prepare" or "train" of cloud/skypilot.yaml; return its exit code."""
    stages = {
        its["name"]: its for its in yaml.safe_load_all((ROOT / "cloud/skypilot.yaml").read_text(encoding="utf-8"))
    }
    command = stages[name]["run"].replace("/bucket", str(pod.folder / "bucket"))
    for folder in ("bucket", "here"):
        (pod.folder / folder).mkdir(exist_ok=True)
    return subprocess.run(["bash", "-c", command], cwd=pod.folder / "here", env=pod.environment | variables).returncode


def test_the_stages_of_skypilot_share_a_bucket(pod) -> None:
    (pod.folder / "here" / "data" / "fineweb-10bt").mkdir(parents=True)
    pod.stub("python", "#!/bin/bash\nexit 5\n")
    assert stage(pod, "prepare") == 5 and not (pod.folder / "bucket" / "fineweb-10bt").exists()
    pod.stub("python", PYTHON)
    assert stage(pod, "prepare") == 0 and (pod.folder / "bucket" / "fineweb-10bt").is_dir()
    (pod.folder / "here").rename(pod.folder / "elsewhere")  # the next stage is another machine
    checkpoint = "mkdir -p runs/gpt2_124m; touch runs/gpt2_124m/checkpoint-"
    assert stage(pod, "train", TRAINING=checkpoint + "1; exit 3") == 3
    (pod.folder / "here").rename(pod.folder / "preempted")
    assert stage(pod, "train", TRAINING=f"test -e runs/gpt2_124m/checkpoint-1 && {checkpoint}2") == 0
    copied = {path.name for path in (pod.folder / "bucket" / "gpt2_124m").iterdir()}
    assert copied == {"checkpoint-1", "checkpoint-2"} and (pod.folder / "here" / "data" / "fineweb-10bt").is_dir()
    assert "--max_hours 4" in pod.calls("python -m gpt2_repro.supervise")[0]


def test_the_deadline_of_lambda_comes_first_and_tries_again(pod) -> None:
    deadline = blocks("cloud/lambda.md")[0]
    assert "setsid" in deadline and "run_and_stop.sh" in blocks("cloud/lambda.md")[1]
    pod.stub(
        "curl",
        '#!/bin/bash\nread -r given\n[[ $given == "user = \\"$LAMBDA_API_KEY:\\"" ]] && echo "curl $*" >>"$CALLS"\nexit 22\n',
    )
    given = {"LAMBDA_API_KEY": KEY, "LAMBDA_INSTANCE_ID": "machine"}
    for missing in given:
        left = {name: value for name, value in given.items() if name != missing}
        subprocess.run(["bash", "-c", deadline], env=pod.environment | left, stderr=subprocess.DEVNULL)
    assert pod.calls() == [] and pod.sleeps() == []
    pod.wake()
    subprocess.run(["bash", "-c", deadline], env=pod.environment | given, check=True)
    wait_for(lambda: len(pod.calls("curl")) > 1)
    assert pod.sleeps()[:2] == ["4h", 60]
    (call, *_) = pod.calls()
    assert '{"instance_ids":["machine"]}' in call and call.endswith("/instance-operations/terminate")
