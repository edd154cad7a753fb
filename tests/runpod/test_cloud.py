"""The commands in runpod/README.md and cloud/ use existing scripts and options."""

import re
import shlex
import subprocess

import pytest

from tests.runpod.conftest import KEY, ROOT, wait_for


def blocks(page: str) -> list[str]:
    return re.findall(
        r"^```bash\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL
    )


@pytest.mark.parametrize("page", ["runpod/README.md", "cloud/lambda.md"])
def test_the_commands_of_the_pages_exist(pod, page: str) -> None:
    commands = re.findall(r"bash runpod/(\w+\.sh)([^\n|]*)", (ROOT / page).read_text(encoding="utf-8"))
    assert commands
    for script, rest in commands:
        code = (ROOT / "runpod" / script).read_text(encoding="utf-8")
        assert all(f"    {option})" in code for option in re.findall(r"(?<= )--\w+", rest.partition(" -- ")[0]))
        if script == "create_pod.sh" and "--" in rest:
            assert pod.run(script, *shlex.split(rest, comments=True))[0] == 0, rest


def test_a_job_of_the_hub_is_started_only_when_that_is_typed(pod) -> None:
    script, words = "../cloud/hf_jobs.sh", ("me/mine", "https://example.org/gpt2.git")
    code, said = pod.run(script, *words)
    assert code == 0 and "--yes" in said and pod.calls() == []
    command = shlex.split(said[: said.index("Nothing was started")].replace("\\\n", ""))
    assert "--flavor a100x8 --timeout 4h --secrets HF_TOKEN -v hf://buckets/me/mine:/bucket" in " ".join(command)
    assert pod.run(script, *words, "--yes")[0] == 0 and pod.calls()[0].startswith("hf jobs run")


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
