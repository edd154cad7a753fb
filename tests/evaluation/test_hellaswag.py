"""HellaSwag losses during training equal those of a plain loop over endings."""

import copy
import gzip
import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from lm_eval.api.instance import Instance

from gpt2_repro.data.tokenizer import number_tokenizer
from gpt2_repro.errors import UserError
from gpt2_repro.evaluation.comparison import EvaluationSettings
from gpt2_repro.evaluation.harness import score_task
from gpt2_repro.evaluation.hellaswag import HellaSwag, mean_losses, read_items
from gpt2_repro.evaluation.references import HELLASWAG_ITEMS
from gpt2_repro.evaluation.scorer import Scorer
from gpt2_repro.evaluation.tasks import write_task_files
from gpt2_repro.model.pretraining import make_pretraining
from gpt2_repro.planning.workload import HELLASWAG_TOKENS
from gpt2_repro.tokenization import load_for_rows
from tests.evaluation.conftest import write_rows


ROW = {"ctx": "A man sits on a roof. he", "endings": ["sings.", "pulls up old shingles.", "is", "a b c"], "label": "1"}


@pytest.fixture(scope="module")
def lines(real_data: Path) -> list[dict]:
    """HellaSwag items of all lengths."""
    with gzip.open(real_data / "hellaswag" / "hellaswag_val.jsonl.gz", "rt") as file:
        return [json.loads(line) for line in file][::401]


@pytest.fixture(scope="module")
def source(lines: list[dict], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hellaswag") / "hellaswag.jsonl"
    write_rows(path, lines)
    return path


@pytest.fixture(scope="module")
def losses_of(network):
    model = make_pretraining(copy.deepcopy(network), vocab_size=50_257)
    return lambda ids, labels: model(input_ids=ids, shift_labels=labels, reduction="none").loss.detach()


@torch.no_grad()
def naive(network, gpt2_tokenizer, line: dict, window: int = 160) -> list[float]:
    """Return the mean loss of each ending of an item, computed one ending at a time."""
    context, means = gpt2_tokenizer(line["ctx"])["input_ids"], []
    for ending in line["endings"]:
        tokens = gpt2_tokenizer(" " + ending)["input_ids"]
        ids = torch.tensor([(context + tokens)[-window - 1 :]])
        logits = network(ids[:, :-1]).logits[0, :, :50_257].double()
        each = F.cross_entropy(logits, ids[0, 1:], reduction="none")
        means.append(each[-len(tokens) :].mean().item())
    return means


def test_losses_and_answers_are_those_of_a_loop(network, losses_of, gpt2_tokenizer, lines, source, caplog) -> None:
    scorer = HellaSwag(read_items(str(source)), gpt2_tokenizer, window=160)
    losses = mean_losses(scorer.rows, losses_of, positions=2000, device=torch.device("cpu")).view(-1, 4)
    expected = torch.tensor([naive(network, gpt2_tokenizer, line) for line in lines], dtype=torch.float64)
    assert losses.shape == (len(lines), 4) and len(lines) == 26
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-5)
    answers = [means.index(min(means)) for means in expected.tolist()]
    assert losses.argmin(1).tolist() == answers and len(set(answers)) == 4
    right = sum(answer == int(line["label"]) for answer, line in zip(answers, lines, strict=True))
    assert scorer.score(losses) == {"hellaswag_acc": round(right / 26, 6), "hellaswag_items": 26}
    # The first of four NaN losses would be chosen, which is correct for a quarter of the items.
    assert scorer.score(losses * torch.nan) == {} and caplog.messages

    # Rows longer than the window lose their beginning. There is one row per pass.
    short = HellaSwag(read_items(str(source))[:5], gpt2_tokenizer, window=24)
    losses = mean_losses(short.rows, losses_of, positions=1, device=torch.device("cpu")).view(-1, 4)
    cut = [naive(network, gpt2_tokenizer, line, window=24) for line in lines[:5]]
    torch.testing.assert_close(losses, torch.tensor(cut, dtype=torch.float64), rtol=1e-5, atol=1e-5)


def test_answers_of_evaluate_are_those_of_a_loop(network, gpt2_tokenizer, lines, source, tmp_path: Path) -> None:
    write_task_files({"hellaswag_completion": source}, tmp_path)
    settings = EvaluationSettings(max_length=256, batch_size=4, seed=1, device="cpu", limit=None)
    _, (metric,) = score_task(network, gpt2_tokenizer, "hellaswag_completion", tmp_path, settings)
    losses = [(naive(network, gpt2_tokenizer, line, window=256), int(line["label"])) for line in lines]
    right = [means.index(min(means)) == label for means, label in losses]
    assert metric.values == right and 0 < sum(right) < 26
    scorer = Scorer(pretrained=network, tokenizer=gpt2_tokenizer, max_length=24, batch_size=4, per_token=True)
    requests = [Instance("", {}, (line["ctx"], f" {ending}"), 0) for line in lines for ending in line["endings"]]
    # The scorer includes the 47 padding ids in the softmax.
    means = [-mean for line in lines for mean in naive(network, gpt2_tokenizer, line, window=24)]
    assert [score for score, _ in scorer.loglikelihood(requests)] == pytest.approx(means, rel=2e-4)


def test_processes_share_the_rows(losses_of, gpt2_tokenizer, source) -> None:
    scorer = HellaSwag(read_items(str(source)), gpt2_tokenizer, window=160)
    options = {"positions": 500, "device": torch.device("cpu")}
    whole = mean_losses(scorer.rows, losses_of, **options)
    passes: list[int] = []
    shares = [
        mean_losses(
            scorer.rows, losses_of, process=one, processes=3, after_batch=lambda one=one: passes.append(one), **options
        )
        for one in range(3)
    ]
    assert torch.equal(sum(shares), whole)
    # With sharded weights all processes must run the same number of passes.
    count = len(scorer.batches(500))
    assert [passes.count(one) for one in range(3)] == [-(-count // 3)] * 3 and count % 3
    assert all(int((share > 0).sum()) > 20 for share in shares)


def test_sources_are_files_packed_or_not_and_datasets(source, lines, tmp_path: Path) -> None:
    items = read_items(str(source))
    assert items == [(line["ctx"], tuple(line["endings"]), int(line["label"])) for line in lines]
    packed = tmp_path / "hellaswag.jsonl.gz"
    packed.write_bytes(gzip.compress(source.read_bytes()))
    assert read_items(str(packed)) == items
    folder = tmp_path / "dataset"
    folder.mkdir()
    (folder / "validation.jsonl").write_bytes(source.read_bytes())
    assert read_items(str(folder)) == items  # read by datasets.load_dataset, like a Hub dataset


@pytest.mark.parametrize("line", [json.dumps(ROW | {"label": ""}), "[1, 2]", "{torn"])
def test_bad_files_are_refused(line: str, tmp_path: Path) -> None:
    (tmp_path / "h.jsonl").write_text(f"{json.dumps(ROW)}\n{line}", encoding="utf-8")
    (tmp_path / "torn.jsonl.gz").write_bytes(gzip.compress(json.dumps(ROW).encode() * 100)[:-20])
    for name in ("h.jsonl", "torn.jsonl.gz", "none.jsonl"):
        with pytest.raises(UserError, match=name):
            read_items(str(tmp_path / name))


def test_a_tokenizer_without_its_text_is_named(tmp_path: Path, source: Path) -> None:
    number_tokenizer(512).save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_for_rows(tmp_path, separator="none")
    with pytest.raises(UserError, match="HellaSwag.*--hellaswag_steps 0"):
        HellaSwag(read_items(str(source)), tokenizer, window=160)


@pytest.mark.slow  # encodes all items, 15 s
def test_what_all_of_it_costs_is_what_a_workload_has(gpt2_tokenizer, real_data: Path) -> None:
    items = read_items(str(real_data / "hellaswag" / "hellaswag_val.jsonl.gz"))
    assert len(items) == HELLASWAG_ITEMS
    scorer = HellaSwag(items, gpt2_tokenizer, window=1024)
    batches = scorer.batches(64 * 1024)
    positions = sum(len(batch) * (len(scorer.rows[batch[0]][0]) - 1) for batch in batches)
    assert positions == HELLASWAG_TOKENS < 1.03 * sum(len(row) - 1 for row, _ in scorer.rows)
