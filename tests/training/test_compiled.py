"""A run that is to be compiled is, and says so; one that is not is warned of."""

import json
import shutil
from pathlib import Path

import pytest

from gpt2_repro.model.compilation import Graph
from gpt2_repro.training.callbacks import check_graphs


GOOD = Graph(training=True, causal=12, masked=0, logits=False)
VALIDATION = Graph(training=False, causal=12, masked=0, logits=False)


MASKED = Graph(training=True, causal=0, masked=12, logits=False)


@pytest.mark.parametrize(
    ("graphs", "masks", "problem"),
    [
        ([VALIDATION, GOOD], False, None),
        ([Graph(True, 7, 0, False), Graph(True, 5, 0, False)], False, None),  # DDP cuts it at its buckets
        ([MASKED], True, None),
        ([], False, "nothing was compiled"),
        ([GOOD, GOOD], False, "24"),
        ([MASKED], False, "'masked': 12"),
        ([Graph(True, 11, 0, False)], False, "11"),
        ([Graph(True, 12, 0, True)], False, "logits"),
        ([GOOD], True, "'causal': 12"),
    ],
)
def test_each_problem_is_named(graphs: list[Graph], masks: bool, problem: str | None) -> None:
    problems = check_graphs(graphs, n_layer=12, masks=masks)
    assert len(problems) == (problem is not None) and (problem or "") in "".join(problems)


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile on a CPU needs a C++ compiler")
def test_a_compiled_run_under_zero1_is_the_eager_one(
    train, events, type_command, tiny_recipe: Path, tmp_path: Path
) -> None:
    # 151 validation rows in batches of 4: the last one is short, and is not compiled anew.
    options = ("--eval_tokens", 151 * 32, "--activation_checkpointing", "--max_steps", 4)
    eager = train(tmp_path / "eager", *options)
    words = ("train.py", tiny_recipe, *options, "--torch_compile", "--per_device_train_batch_size", 4)
    run = tmp_path / "compiled"
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    done = type_command("launch", 1, *words, "--output_dir", run, timeout=500, **cache)
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"compiling the training step; the cache is {tmp_path}/cache" in done.stdout
    assert done.stdout.count("compiling the ") == 2  # one for training, one for validation
    engine = json.loads((run / "environment.json").read_text())["engine"]
    assert engine["compiled"] is True and engine["compilation_problems"] == []
    for ours, theirs in zip(events(run), events(eager), strict=True):
        for key in ("loss", "eval_loss"):
            assert ours.get(key) == pytest.approx(theirs.get(key), abs=1e-5), ours["step"]
