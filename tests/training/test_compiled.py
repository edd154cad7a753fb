"""A run that is to be compiled is, and says so; one that is not is warned of."""

import json
import shutil
from pathlib import Path

import pytest

from gpt2_repro.model.compilation import Graph
from gpt2_repro.training.compiled import check_graphs


GOOD = Graph(training=True, causal=12, masked=0, logits=False)
VALIDATION = Graph(training=False, causal=12, masked=0, logits=False)


@pytest.mark.parametrize(
    ("graphs", "problem"),
    [
        ([], "nothing was compiled"),
        ([VALIDATION], "nothing was compiled"),
        ([GOOD, GOOD], "24 attentions were compiled for 12 layers"),
        ([Graph(True, 0, 12, False)], "12 attentions get a mask"),
        ([Graph(True, 11, 0, False)], "11 of 12 attentions"),
        ([Graph(True, 12, 0, True)], "logits"),
    ],
)
def test_each_problem_is_named(graphs: list[Graph], problem: str) -> None:
    assert problem in check_graphs(graphs, n_layer=12)[0]


def test_with_a_mask_of_documents_the_one_without_it_is_the_problem() -> None:
    assert check_graphs([Graph(True, 0, 12, False)], n_layer=12, masks=True) == []
    assert "12 attentions get no mask" in check_graphs([GOOD], n_layer=12, masks=True)[0]
    assert "24 attentions" in check_graphs([Graph(True, 0, 12, False)] * 2, n_layer=12, masks=True)[0]
    assert "11 of 12 attentions get a mask" in check_graphs([Graph(True, 0, 11, False)], n_layer=12, masks=True)[0]


def test_a_good_graph_has_no_problem() -> None:
    assert check_graphs([VALIDATION, GOOD], n_layer=12) == []
    # DDP cuts it at its buckets.
    assert check_graphs([Graph(True, 7, 0, False), Graph(True, 5, 0, False)], n_layer=12) == []


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
    assert "compiled: 1 graph, 2 causal attentions, no logits; first step" in done.stdout
    assert done.stdout.count("compiling the ") == 2  # one for training, one for validation
    engine = json.loads((run / "environment.json").read_text())["engine"]
    assert engine["compiled"] is True and engine["compilation_problems"] == []
    accounts = json.loads((run / "run_status.json").read_text())["accounts"]
    assert accounts["startup"] > 10 * accounts["training"] > 0 and accounts["validation"] < accounts["startup"]
    for ours, theirs in zip(events(run), events(eager), strict=True):
        for key in ("loss", "eval_loss"):
            assert ours.get(key) == pytest.approx(theirs.get(key), abs=1e-5), ours["step"]


@pytest.mark.slow
def test_a_run_that_did_not_compile_is_announced(type_command, tiny_recipe: Path, tmp_path: Path) -> None:
    words = ("python", "train.py", tiny_recipe, "--output_dir", tmp_path / "run", "--torch_compile", "--max_steps", 4)
    done = type_command(*words, TORCHDYNAMO_DISABLE="1")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "compilation: nothing was compiled" in done.stdout + done.stderr
    engine = json.loads((tmp_path / "run" / "environment.json").read_text())["engine"]
    assert engine["compiled"] is False and "nothing was compiled" in engine["compilation_problems"][0]
