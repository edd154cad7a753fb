"""Scores with the project's task files equal those of a plain loop."""

import itertools
import json
import random
import string
import unicodedata
from pathlib import Path

import pytest

from gpt2_repro.errors import UserError
from gpt2_repro.evaluation.comparison import EvaluationSettings
from gpt2_repro.evaluation.harness import evaluate_model
from gpt2_repro.evaluation.passages import NUM_PASSAGES, cut_passages
from gpt2_repro.evaluation.tasks import find_local_files, own_documents, write_task_files
from gpt2_repro.files import read_json_lines
from tests.evaluation.conftest import write_rows


def test_documents_of_a_folder_that_was_prepared_again_are_refused(tmp_path: Path) -> None:
    run, data = tmp_path / "run", tmp_path / "data"
    write_rows(run / "recipe.yaml", [{"data": {"dataset_dir": str(data)}}])
    write_rows(run / "environment.json", [{"data": {"sha256": {"validation": "a"}}}])
    write_rows(data / "text" / "validation.jsonl", [])
    for manifest in ({"sha256": {"validation": "a"}}, {}):
        write_rows(data / "manifest.json", [manifest])
        assert own_documents(run, ["last_word"]) == data
    write_rows(data / "manifest.json", [{"sha256": {"validation": "b"}}])
    assert own_documents(run, ["wikitext"]) is None
    with pytest.raises(UserError, match=f"--local_data {data}"):
        own_documents(run, ["last_word"])


def test_blimp_from_the_hub_is_the_group_of_lm_eval(tmp_path: Path) -> None:
    """A task file would replace the group of 67 tasks by one of them."""
    tasks = ["blimp", "wikitext"]
    assert write_task_files(dict.fromkeys(tasks), tmp_path / "hub").keys() == {"wikitext"}
    assert [path.name for path in (tmp_path / "hub").iterdir()] == ["wikitext.yaml"]
    write_rows(tmp_path / "blimp.jsonl", [{"sentence_good": "It is.", "sentence_bad": "It are."}])
    assert (write_tasks(tmp_path, tmp_path / "tasks", tasks) / "blimp.yaml").is_file()


def score(model, tokenizer, tasks, folder, *, max_length, limit=None):
    """Return lm-eval's results and samples of each task."""
    settings = EvaluationSettings(max_length=max_length, batch_size=4, seed=1, device="cpu", limit=limit)
    return {task: evaluate_model(model, tokenizer, task, folder, settings) for task in tasks}


def write_tasks(data: Path, folder: Path, tasks: list[str]) -> Path:
    write_task_files(find_local_files(data, tasks), folder)
    return folder


def test_passages_have_lambadas_form_and_are_spread_over_documents(prose):
    many = [f"{number} {text}" for number, text in enumerate(prose * 90)]
    passages = cut_passages(many)
    assert len(passages) == NUM_PASSAGES and passages == cut_passages(many)
    text = " ".join(" ".join(document.split()) for document in many)
    for passage in passages:
        words = passage.split(" ")
        assert passage in text and 40 <= len(words) <= 60
        assert words[-1].isalpha() and len(words[-1]) >= 3
        assert words[-1] in [word.strip(string.punctuation) for word in words[:-1]]
    long = cut_passages([f"{number} {prose[-1]}" for number in range(3 * NUM_PASSAGES)])
    assert [int(passage.split()[0]) for passage in long] == list(range(0, 3 * NUM_PASSAGES, 3))


# Words with vowel signs, vowel points or accents that are characters of their own.
SCRIPTS = {
    "Hindi": "नदी पत्थर रोशनी बगीचा सर्दी चिट्ठी संगीत कहानी",
    "Tamil": "ஆறு கல் ஒளி தோட்டம் குளிர்காலம் கடிதம் இசை கதை",
    "Vietnamese": "tiếng nước người những được đường thành phố",
    "Arabic": "كِتَابٌ نَهْرٌ حَجَرٌ نُورٌ حَدِيقَةٌ شِتَاءٌ رِسَالَةٌ",
    "Hebrew": "שָׁלוֹם נָהָר אֶבֶן אוֹר גִּנָּה חֹרֶף מִכְתָּב",
    "Persian": "می\u200cخواهم کتاب\u200cها رودخانه سنگ روشنایی",
    "Thai": "แม่น้ำ ก้อนหิน สวนหย่อม ฤดูหนาว ดนตรี",
}


@pytest.mark.parametrize("form", ["NFC", "NFD"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_last_words_may_have_vowel_signs_and_accents(script: str, form: str) -> None:
    words = SCRIPTS[script].split()
    source = random.Random(1)
    text = " ".join(source.choices(words, k=4000))
    passages = cut_passages([unicodedata.normalize(form, text)])
    targets = [unicodedata.normalize("NFC", passage.split()[-1]) for passage in passages]
    words = [unicodedata.normalize("NFC", word) for word in words]
    # The targets are the longest words of the last 20, as in scripts without marks.
    longest = [target for target in targets if len(target) == max(map(len, words))]
    assert len(passages) > 60 and len(longest) > 0.8 * len(targets)
    assert [unicodedata.normalize("NFC", passage) for passage in passages] == cut_passages(
        [unicodedata.normalize("NFC", text)]
    )


def test_no_last_word_has_punctuation_or_digits() -> None:
    words = ["नदी।", "«river»", "1234", "a\u0301", "don't", "x-ray", "\u0301abc", "।।।।", "river", "و"]
    source = random.Random(1)
    passages = cut_passages([" ".join(source.choices(words, k=3000))])
    assert passages and {passage.split()[-1] for passage in passages} == {"river"}


@pytest.mark.parametrize("mark", ["{}।", "“{}”", "{}،", "«{}»", "({})."])
def test_an_earlier_word_may_have_punctuation_of_any_script(mark: str) -> None:
    earlier = [mark.format("river"), *(f"w{number}" for number in range(45))]
    (passage,) = cut_passages([" ".join([*earlier, "river"])])
    assert passage.endswith(" river")


ITEM = {"activity_label": "Roof", "ctx_a": "A man sits.", "ctx_b": "he", "ctx": "A man sits. he", "label": "1"}
ITEM |= {"endings": ["sings.", "pulls up old shingles.", "is", "a b c"]}


@pytest.mark.parametrize(
    ("task", "good", "bad"),
    [
        ("hellaswag", ITEM, ITEM | {"label": 4}),
        *(("hellaswag", ITEM, ITEM | {"endings": endings}) for endings in (["a", "b", "c", ""], "abcd")),
        ("hellaswag_completion", ITEM, ITEM | {"ctx": " "}),
        *(("wikitext", {"page": "a b"}, {"page": page}) for page in ("\n", 5)),
        ("lambada_openai", {"text": "a b"}, ["a b"]),
    ],
)
def test_a_row_that_cannot_be_scored_is_named_before_scoring(task, good, bad, tmp_path):
    path = tmp_path / f"{'hellaswag' if 'hellaswag' in task else task}.jsonl"
    path.write_text(f"{json.dumps(good)}\n\n" * 2 + json.dumps(bad) + "\n", encoding="utf-8")
    with pytest.raises(UserError, match=f"{path}, line 5,"):
        write_tasks(tmp_path, tmp_path / "tasks", [task])


def test_a_file_with_a_byte_order_mark_and_mixed_labels_is_read(tmp_path):
    """A byte order mark, labels of two kinds and further columns change no row."""
    items = [ITEM, ITEM | {"label": 2, "ctx_b": "", "source": 5}, ITEM | {"label": "0", "source": "a"}]
    written = []
    for name, rows in (("one", items), ("two", [row | {"label": int(row["label"])} for row in items])):
        write_rows(path := tmp_path / name / "hellaswag.jsonl", rows)
        path.write_bytes(b"\xef\xbb\xbf" * (name == "one") + path.read_bytes())
        folder = write_tasks(tmp_path / name, tmp_path / name / "tasks", ["hellaswag"])
        written.append(next(folder.glob("*.jsonl")).read_text(encoding="utf-8"))
    assert written[0] == written[1] and written[0].count("\n") == 3


@pytest.mark.slow
def test_local_files_give_the_requests_and_scores_of_the_stock_tasks(
    network, gpt2_tokenizer, real_data, tmp_path, monkeypatch
):
    """Tasks on local files give the requests and scores of lm-eval's own tasks."""
    import datasets

    hub = {"lambada_openai": "EleutherAI/lambada_openai", "hellaswag": "Rowan/hellaswag"}
    hub["wikitext"] = "EleutherAI/wikitext_document_level"
    for task, path in find_local_files(real_data, hub).items():
        write_rows(tmp_path / f"{task}.jsonl", (row for _, row in itertools.islice(read_json_lines(path), 10)))
    folder = write_tasks(tmp_path, tmp_path / "tasks", list(hub))
    ours = score(network, gpt2_tokenizer, hub, folder, max_length=256, limit=4)

    load, fetched = datasets.load_dataset, []

    def from_files(path: str, **_):
        task = next(task for task in hub if hub[task] == path)
        fetched.append(task)
        file = str(tmp_path / f"{task}.jsonl")
        return load("json", data_files=dict.fromkeys(("train", "validation", "test"), file))

    monkeypatch.setattr("datasets.load_dataset", from_files)
    theirs = score(network, gpt2_tokenizer, hub, tmp_path / "stock", max_length=256, limit=4)
    assert sorted(fetched) == sorted(hub)
    for task in hub:
        (mine, my_samples), (stock, stock_samples) = ours[task], theirs[task]
        assert mine["results"] == stock["results"] and mine["versions"] == stock["versions"]
        for one, other in zip(my_samples[task], stock_samples[task], strict=True):
            assert one["arguments"] == other["arguments"] and one["resps"] == other["resps"]
    assert ours["lambada_openai"][0]["n-samples"]["lambada_openai"] == {"original": 10, "effective": 4}
