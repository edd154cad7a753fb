"""Task files and passages: lm-evaluation-harness on local files gives what a plain loop over the model gives."""

import json
import math
import os
import re
import string
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

from gpt2_repro.errors import UserError
from gpt2_repro.evaluation.documents import NUM_PASSAGES, cut_passages, documents_to_score, evenly
from gpt2_repro.evaluation.harness import evaluate_model
from gpt2_repro.evaluation.tasks import LOCAL_TASKS, check_tasks, find_local_files, stock_task_names, write_task_files


REAL_DATA = Path(os.environ.get("GPT2_REPRO_TEST_DATA", Path(__file__).parents[2] / ".." / "shared" / "data"))


def write_documents(folder: Path, documents: list[str]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps({"text": document}) + "\n" for document in documents)
    (folder / "validation.jsonl").write_text(lines)
    return folder


def score(model, tokenizer, tasks, folder, *, max_length, limit=None):
    return evaluate_model(
        model,
        tokenizer,
        tasks=tasks,
        task_folder=folder,
        max_length=max_length,
        batch_size=4,
        device="cpu",
        limit=limit,
        seed=1,
    )


def token_log_probabilities(model, ids: list[int]) -> torch.Tensor:
    """Of every id after the first, and the model's guess there."""
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, :-1]
    return logits.log_softmax(-1)


def test_own_tasks_equal_a_plain_loop(model, tokenizer, documents, tmp_path):
    tasks = ["last_word", "document_perplexity"]
    write_task_files(write_documents(tmp_path / "text", documents), tmp_path / "tasks", tasks)
    results = score(model, tokenizer, tasks, tmp_path / "tasks", max_length=64)["results"]

    correct, log_likelihoods = [], []
    for passage in cut_passages(documents):
        context, word = passage.rsplit(" ", 1)
        prefix, target = tokenizer.encode(context), tokenizer.encode(" " + word)
        ids = (prefix + target)[-65:]
        log_probabilities = token_log_probabilities(model, ids)[-len(target) :]
        correct.append(log_probabilities.argmax(-1).tolist() == target)
        log_likelihoods.append(sum(log_probabilities[place, token].item() for place, token in enumerate(target)))
    assert len(correct) > 5
    assert results["last_word"]["acc,none"] == pytest.approx(sum(correct) / len(correct), abs=1e-9)
    expected = math.exp(-sum(log_likelihoods) / len(log_likelihoods))
    assert results["last_word"]["perplexity,none"] == pytest.approx(expected, rel=1e-4)

    total, num_words, num_bytes = 0.0, 0, 0
    for document in documents:
        targets = tokenizer.encode(document)
        inputs = [tokenizer.bos_token_id, *targets]
        for start in range(0, len(targets), 64):
            end = min(start + 64, len(targets))
            # The last window reaches back for context until it is full.
            ids = inputs[max(0, end - 64) : end] + targets[end - 1 : end]
            picked = token_log_probabilities(model, ids)[-(end - start) :]
            total += sum(picked[place, token].item() for place, token in enumerate(targets[start:end]))
        num_words += len(re.split(r"\s+", document))
        num_bytes += len(document.encode())
    scores = results["document_perplexity"]
    assert scores["word_perplexity,none"] == pytest.approx(math.exp(-total / num_words), rel=1e-4)
    assert scores["byte_perplexity,none"] == pytest.approx(math.exp(-total / num_bytes), rel=1e-4)
    assert scores["bits_per_byte,none"] == pytest.approx(-total / num_bytes / math.log(2), rel=1e-4)


def test_passages_have_lambadas_form(documents):
    passages = cut_passages(documents)
    assert passages == cut_passages(documents), "the same documents give the same passages"
    text = " ".join(" ".join(document.split()) for document in documents)
    for passage in passages:
        words = passage.split(" ")
        assert passage in text and 40 <= len(words) <= 60
        assert words[-1].isalpha() and len(words[-1]) >= 3
        assert words[-1] in [word.strip(string.punctuation) for word in words[:-1]]


def test_passages_are_spread_over_documents(documents):
    many = [f"{number} " + documents[-1] for number in range(3 * NUM_PASSAGES)]
    passages = cut_passages(many)
    assert len(passages) == NUM_PASSAGES
    numbers = [int(passage.split()[0]) for passage in passages]
    assert numbers == list(range(0, 3 * NUM_PASSAGES, 3)), "every third document gives its first passage"


def test_documents_to_score_are_a_spread_of_about_the_same_size():
    documents = [f"{number:05d}" * 200 for number in range(5000)]  # 5 MB
    chosen = documents_to_score(documents)
    assert 1_290_000 < sum(map(len, chosen)) <= 1_300_000 and chosen[-1] > documents[4900]
    assert documents_to_score(documents[:7]) == documents[:7]
    assert evenly([1, 2, 3, 4, 5], 2) == [1, 3]


def test_stale_task_files_are_removed(documents, tmp_path):
    folder = write_documents(tmp_path / "text", documents)
    write_task_files(folder, tmp_path / "tasks", ["last_word"])
    write_task_files(folder, tmp_path / "tasks", ["document_perplexity"])
    assert [path.name for path in (tmp_path / "tasks").glob("*.yaml")] == ["document_perplexity.yaml"]


def test_prepared_folder_holds_the_documents_under_text(documents, tmp_path):
    write_documents(tmp_path / "data" / "text", documents)
    assert find_local_files(tmp_path / "data", ["last_word", "arc_easy"]) == {
        "last_word": tmp_path / "data" / "text" / "validation.jsonl"
    }


def test_known_tasks_are_the_harness_s():
    names = stock_task_names()
    assert {"lambada_openai", "hellaswag", "wikitext", "arc_easy", "mmlu"} <= names
    assert not names & {"last_word", "document_perplexity"}
    check_tasks(["arc_easy", "hellaswag"], {})


@pytest.mark.parametrize(
    ("task", "words"),
    [("hellaswagg", "did you mean 'hellaswag'"), ("lastword", "'last_word'"), ("last_word", "--local_data DIR")],
)
def test_unknown_task_names_the_nearest(task, words):
    with pytest.raises(UserError, match=re.escape(words)):
        check_tasks([task], {})


def test_local_data_must_be_a_folder_with_data(documents, tmp_path):
    with pytest.raises(UserError, match="no folder"):
        find_local_files(tmp_path / "absent", ["wikitext"])
    with pytest.raises(UserError, match="holds no data for wikitext: put wikitext.jsonl there"):
        find_local_files(write_documents(tmp_path, documents), ["wikitext"])


@pytest.mark.parametrize(
    ("content", "words"),
    [("", "holds no document"), ('{"text": "a"}\n{"page": "b"}\n', "line 2"), ('{"text": "short"}\n', "too short")],
)
def test_bad_documents_are_refused(content, words, tmp_path):
    (tmp_path / "validation.jsonl").write_text(content)
    with pytest.raises(UserError, match=words):
        write_task_files(tmp_path, tmp_path / "tasks", ["last_word"])


@pytest.mark.skipif(not (REAL_DATA / "gpt2").is_dir(), reason=f"no real data in {REAL_DATA} (GPT2_REPRO_TEST_DATA)")
def test_stock_tasks_run_from_real_local_files(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(REAL_DATA / "gpt2")
    torch.manual_seed(0)
    network = GPT2LMHeadModel(GPT2Config(n_positions=256, n_embd=16, n_layer=1, n_head=1)).eval()
    tasks = ["lambada_openai", "hellaswag", "wikitext"]
    write_task_files(REAL_DATA, tmp_path / "tasks", tasks)
    results = score(network, tokenizer, tasks, tmp_path / "tasks", max_length=256, limit=4)

    assert {task: results["n-samples"][task]["effective"] for task in tasks} == dict.fromkeys(tasks, 4)
    assert results["n-samples"]["lambada_openai"]["original"] == 5153
    # A model with tiny random weights gives every id about 1/50257.
    assert results["results"]["wikitext"]["word_perplexity,none"] == pytest.approx(50257**1.13, rel=0.5)
    assert results["results"]["hellaswag"].keys() >= {"acc,none", "acc_norm,none"}
    assert results["versions"] == {"lambada_openai": 1.0, "hellaswag": 1.0, "wikitext": 2.0}
    assert LOCAL_TASKS.keys() > set(tasks)
