"""Rows, scores and tables against what plain loops give."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from gpt2_repro.evaluation.diagnosis import scoring
from gpt2_repro.evaluation.diagnosis.positions import find_jump, position_edges
from gpt2_repro.evaluation.diagnosis.probes import start_token
from gpt2_repro.evaluation.diagnosis.profiles import (
    Targets,
    by_domain,
    by_frequency,
    by_position,
    clustered,
    join,
)
from gpt2_repro.evaluation.diagnosis.scoring import RowScore, score_rows
from gpt2_repro.evaluation.diagnosis.sources import read_texts
from gpt2_repro.evaluation.diagnosis.texts import Domain, ask, draw_sample, of_documents, of_rows, split_passage
from gpt2_repro.evaluation.tasks import find_local_files


def domain(name: str, lengths: list[int]) -> Domain:
    return Domain(name, [np.arange(length) for length in lengths], [], [], [])


def test_scores_equal_a_loop_over_rows(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "POSITIONS", 500)  # several batches
    source = np.random.default_rng(0)
    lengths = [2, 129, 3, 128, 40, 2, 77, *[100] * 9]
    rows = [source.integers(0, model.config.vocab_size, length).astype(np.uint16) for length in lengths]
    for row, (losses, hits) in zip(rows, score_rows(model, rows, device="cpu", name=""), strict=True):
        ids = torch.tensor(row.astype(np.int64))
        with torch.no_grad():
            logits = model(ids[None, :-1]).logits[0]
        assert np.allclose(losses, torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none"), atol=1e-4)
        assert (hits == (logits.argmax(-1) == ids[1:]).numpy()).all()


def test_a_sample_has_each_target_once_and_about_as_many_as_asked() -> None:
    sample = draw_sample([domain("a", [25, 1, 11]), domain("b", [2] * 50)], window=10, tokens=1000)
    assert [len(row) for row in sample.rows] == [11, 11, 5, 11, *[2] * 50]
    assert sample.document.tolist() == [0, 0, 0, 2, *range(3, 53)]
    assert [row.tolist() for row in sample.rows[:3]] == [[*range(11)], [*range(10, 21)], [*range(20, 25)]]
    few = draw_sample([domain("a", [101] * 40), domain("b", [2] * 500)], window=10, tokens=200)
    targets = np.bincount(few.domain, [len(row) - 1 for row in few.rows])
    assert targets.tolist() == [200, 200]
    assert len(set(few.document[few.domain == 0])) == 20  # spread over the documents


def test_packed_rows_give_whole_starts_and_ends(tokenizer: PreTrainedTokenizerBase) -> None:
    end = tokenizer.eos_token_id
    found = of_rows("", [np.array([7, 8, end, 1, 2, end, 3]), np.array([end, 4, 5])], tokenizer, separator=end)
    assert [ids.tolist() for ids in found.starts] == [[1, 2], [3], [4, 5]]
    assert [ids.tolist() for ids in found.ends if len(ids) > 1] == [[7, 8, end], [end, 1, 2, end]]
    assert of_rows("", [np.array([7, end, 8])], tokenizer, separator=None).starts == []
    assert of_documents("", ["river stone"], tokenizer, separator=end).ends[0][-1] == end


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("He came. She saw the old garden", ("He came. ", "She saw the old", "garden")),
        (
            '"Is it so?" he asked. "It is," she said, "a story',
            ('"Is it so?" he asked. ', '"It is," she said, "a', "story"),
        ),
        ("``Why?'' said Ann", ("``Why?'' ", "said", "Ann")),
        ("one sentence alone", None),
        ("It ended. Then", None),
    ],
)
def test_the_last_sentence_is_found(text: str, parts: tuple[str, str, str] | None) -> None:
    found = split_passage(text)
    assert (found and (found.before, found.sentence, found.word)) == parts


def test_questions_are_encoded_as_the_harness_does(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, real_data: Path
) -> None:
    from lm_eval.models.huggingface import HFLM

    gpt2 = AutoTokenizer.from_pretrained(real_data / "gpt2")
    scorer = HFLM(pretrained=model, tokenizer=gpt2, device="cpu")
    asked = 0
    for text in read_texts("lambada_openai", real_data / "lambada" / "lambada_test.jsonl")[:200]:
        passage = split_passage(text)
        if passage is None:
            continue
        context, target = scorer._encode_pair(passage.before + passage.sentence, " " + passage.word)
        whole, alone = ask(passage, gpt2, 1024)
        assert (whole.ids.tolist(), whole.targets) == ([*context, *target], len(target))
        assert alone.ids[-alone.targets :].tolist() == target
        assert len(alone.ids) < len(whole.ids)
        asked += 1
    assert asked > 150


def test_wikitext_is_what_the_harness_shows(real_data: Path) -> None:
    pages = read_texts("wikitext", find_local_files(real_data, ["wikitext"])["wikitext"])
    assert len(pages) == 60
    assert all(" @-@ " not in page and " , " not in page for page in pages)


def test_lines_end_where_json_lines_do(tmp_path: Path) -> None:
    path = tmp_path / "lambada_openai.jsonl"
    path.write_text('{"text": "one \u2028 line"}\n\n{"text": "another \x85 one"}\n\n', encoding="utf-8")
    assert read_texts("lambada_openai", path) == ["one \u2028 line", "another \x85 one"]


def random_targets(source: np.random.Generator, rows: int, window: int) -> Targets:
    sample = draw_sample(
        [domain("a", [window + 1] * rows), domain("b", [window // 2] * rows)], window=window, tokens=10**6
    )
    scores = [
        [RowScore(source.exponential(3, len(row) - 1), source.random(len(row) - 1) < 0.5) for row in sample.rows]
        for _ in range(2)
    ]
    return join(sample, *scores)


def test_tables_equal_plain_sums() -> None:
    targets = random_targets(np.random.default_rng(0), rows=20, window=32)
    edges = position_edges(32)
    counts = np.bincount(targets.token) * 10 ** (np.arange(targets.token.max() + 1) % 6)
    for buckets, of_target in [
        (by_domain(targets), [targets.names[number] for number in targets.domain]),
        (
            by_position(targets, edges),
            [next(edge for edge in reversed(edges) if edge <= at) for at in targets.position],
        ),
        (
            by_frequency(targets, counts),
            [
                sum(counts[token] / counts.sum() >= limit for limit in (1e-3, 1e-4, 1e-5, 1e-6))
                for token in targets.token
            ],
        ),
    ]:
        names = dict.fromkeys(of_target)
        assert len(buckets) == len(names)
        assert sum(bucket.tokens for bucket in buckets) == len(targets.token)
        expected = {
            round(float(np.mean([loss for loss, name in zip(targets.ours, of_target, strict=True) if name == one])), 9)
            for one in names
        }
        assert {round(bucket.ours, 9) for bucket in buckets} == expected


def test_position_edges_end_in_the_last_position_alone() -> None:
    assert position_edges(1024)[:10] == [0, 1, 2, 4, 8, 16, 32, 64, 128, 192]
    assert position_edges(1024)[-3:] == [960, 1023, 1024]
    assert position_edges(2) == [0, 1, 2]


def test_errors_are_those_of_documents_not_of_tokens() -> None:
    source = np.random.default_rng(0)
    cluster = np.repeat(np.arange(100), 50)
    estimates = [
        clustered(source.normal(size=5000) + np.repeat(source.normal(size=100), 50), cluster)[0] for _ in range(300)
    ]
    spread = np.std([estimate.value for estimate in estimates])
    assert np.mean([estimate.stderr for estimate in estimates]) == pytest.approx(spread, rel=0.15)
    assert clustered(np.ones(5), np.zeros(5, np.int64))[0].stderr == math.inf


@pytest.mark.parametrize(
    ("rise", "expected"),
    [
        (lambda position: 0.3 * (position >= 32), 32),
        (lambda position: 3.0 * (position == 63), 63),
        (lambda position: 0.3 * (position >= 40), 40),
        (lambda position: 0.02 * position, None),  # a drift comes from no single position
        (lambda position: 0.0 * position, None),
        (lambda position: -0.3 * (position >= 32), None),
    ],
)
def test_a_jump_is_found_where_it_is(rise, expected: int | None) -> None:
    source = np.random.default_rng(0)
    sample = draw_sample([domain("a", [65] * 400)], window=64, tokens=10**6)
    text = [source.exponential(3, 64) for _ in sample.rows]
    losses = [
        [
            RowScore(of_text + source.normal(0, 0.5, 64) + grow * rise(np.arange(64)), np.zeros(64, bool))
            for of_text in text
        ]
        for grow in (1, 0)
    ]
    jump = find_jump(join(sample, *losses), position_edges(64))
    assert (jump and jump.position) == expected


def test_the_start_token_costs_what_it_raises_the_later_losses_by() -> None:
    def scores(first: list[float], later: float) -> list[RowScore]:
        return [
            RowScore(np.array([*first, *[later + number] * 7]), np.zeros(7 + len(first), bool)) for number in range(5)
        ]

    found = start_token(scores([9.0], 3.0), scores([], 2.5), scores([8.0], 2.0), scores([], 2.0))
    assert (found.ours.value, found.theirs.value, found.difference.value) == (0.5, 0.0, 0.5)
    assert [(place.label, place.ours, place.ours_without) for place in found.places] == [
        ("1", 9.0, None),
        ("2 to 3", 5.0, 4.5),
        ("4 to 7", 5.0, 4.5),
        ("8", 5.0, 4.5),
    ]
