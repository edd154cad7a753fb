"""Scores per word exist only for text that white space divides into words, and are never infinite."""

import copy
import math

import numpy as np
import pytest
import torch

from gpt2_repro.evaluation import statistics
from gpt2_repro.evaluation.comparison import EvaluationSettings
from gpt2_repro.evaluation.harness import evaluate_model
from gpt2_repro.evaluation.reading import read_scores
from gpt2_repro.evaluation.tasks import find_local_files, write_task_files
from gpt2_repro.evaluation.words import has_words
from tests.evaluation.conftest import write_rows


SPACED = {
    "English": "The river runs past the old stone garden.",
    "German": "Donaudampfschifffahrtsgesellschaft heißt das längste Wort, das ich kenne.",
    "Finnish": "Epäjärjestelmällisyys on pitkä sana, mutta lyhyitäkin sanoja on olemassa.",
    "Greenlandic": "Inuit tamarmik inunngorput nammineersinnaassuseqarlutik assigiimmillu ataqqinassuseqarlutik.",
    "Korean": "모든 인간은 태어날 때부터 자유로우며 그 존엄과 권리에 있어 동등하다.",
    "Hindi": "सभी मनुष्यों को गौरव और अधिकारों के मामले में जन्मजात स्वतन्त्रता है।",
    "code": "def length(words):\n    return sum(len(word) for word in words) / max(1, len(words))",
}
UNSPACED = {
    "Chinese": "人人生而自由，在尊严和权利上一律平等。",
    "a poem": "床前明月光\n疑是地上霜\n举头望明月\n低头思故乡",
    "Japanese": "すべての人間は、生まれながらにして自由であり、かつ、尊厳と権利とについて平等である。",
    "Thai": "มนุษย์ทั้งหลายเกิดมามีอิสระและเสมอภาคกัน ในเกียรติศักดิ์และสิทธิ",
    "Khmer": "មនុស្សទាំងអស់\u200bកើតមក\u200bមានសេរីភាព និងសមភាព",
    "Lao": "ມະນຸດທຸກຄົນເກີດມາມີກຽດສັກ ສິດ ເສລີພາບ",
    "Burmese": "လူတိုင်းသည် တူညီ လွတ်လပ်သော ဂုဏ်သိက္ခာဖြင့်",
    "DNA": "\n".join(["ACGTTGCA" * 10] * 5),
}


@pytest.mark.parametrize("language", [*SPACED, *UNSPACED])
def test_white_space_divides_some_languages_into_words(language: str) -> None:
    text = SPACED.get(language) or UNSPACED[language]
    assert has_words([text]) is (language in SPACED)
    assert has_words([text] * 9 + ["The river runs."]) is (language in SPACED)


def score(model, tokenizer, page: str, folder) -> dict:
    write_rows(folder / "wikitext.jsonl", [{"page": page}] * 2)
    write_task_files(find_local_files(folder, ["wikitext"]), folder / "tasks")
    settings = EvaluationSettings(max_length=64, batch_size=1, seed=1, device="cpu")
    results, samples = evaluate_model(model, tokenizer, "wikitext", folder / "tasks", settings)
    return {metric.name: metric for metric in read_scores(results, samples, tokenizer)}


def test_a_perplexity_that_overflows_leaves_the_other_scores(model, tokenizer, tmp_path) -> None:
    english = score(model, tokenizer, "the river was old", tmp_path)
    nats = math.log(english["word_perplexity"].value) * 4
    assert english["bits_per_byte"].value == pytest.approx(nats / math.log(2) / 17)
    loud = copy.deepcopy(model)
    with torch.no_grad():
        loud.transformer.ln_f.weight.mul_(10_000)
    overflowing = score(loud, tokenizer, "the river was old", tmp_path)
    assert overflowing.keys() == english.keys() and overflowing["nats_per_token"].value > 709
    assert overflowing["word_perplexity"].value is overflowing["word_perplexity"].stderr is None
    chinese = score(model, tokenizer, UNSPACED["Chinese"] * 20, tmp_path)
    assert chinese.keys() == english.keys() - {"word_perplexity"}
    assert all(metric.value > 0 for metric in chinese.values())


def test_an_infinite_perplexity_has_no_value_error_or_verdict() -> None:
    pages = np.array([[-800.0 * (1 + page / 100), 1] for page in range(40)])
    better = pages / [2, 1]
    assert statistics.standard_error(statistics.WEIGHTED_PERPLEXITY, pages.tolist()) is None
    for ours, baseline in ((better, pages), (pages, better), (pages, pages)):
        difference = statistics.paired(
            "word_perplexity", statistics.WEIGHTED_PERPLEXITY, ours, baseline, higher_is_better=False
        )
        assert difference is None
    bits = statistics.paired("bits_per_byte", statistics.BITS_PER_BYTE, better, pages, higher_is_better=False)
    assert bits.verdict == "better"
