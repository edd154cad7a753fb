"""A prepared folder is absent or complete, and the same for any number of workers."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

import prepare_data
from gpt2_repro.data.arguments import PreparationOptions
from gpt2_repro.data.preparation.prepare import prepare
from gpt2_repro.data.reference_losses import reference_losses
from gpt2_repro.data.rows import open_rows
from gpt2_repro.data.sources.small_texts import Topics, module_docstrings
from gpt2_repro.errors import UserError


@pytest.mark.parametrize("form", [{}, {"packing": "wrap", "min_length": 12, "max_tokens": 3000}])
def test_any_number_of_workers_gives_the_same_bytes(arguments, form: dict, content) -> None:
    one, two = arguments("one", **form), arguments("two", **form)
    counts = prepare(one).manifest.counts.values()
    prepare(two, PreparationOptions(num_proc=2))
    assert content(one.dataset_dir) == content(two.dataset_dir)
    if one.max_tokens:
        assert 3000 <= sum(of.tokens for of in counts) < 3000 + 2000


def test_a_finished_folder_is_returned_and_changed_files_are_named(
    arguments, corpus: list[Path], tmp_path: Path, caplog, content
) -> None:
    path = tmp_path / "grows.jsonl"
    path.write_text('{"text": "one"}\n', encoding="utf-8")
    files = {"data_files": [*map(str, corpus), str(tmp_path / "*.jsonl")]}
    data, before = prepare(arguments(**files)), content(tmp_path / "out")
    for text, named in (("one", False), ("one more", True), (None, False)):
        path.unlink() if text is None else path.write_text(json.dumps({"text": text}) + "\n", encoding="utf-8")
        caplog.clear()
        assert prepare(arguments(**files)) == data
        assert (str(path) in caplog.text) == named
    with pytest.raises(UserError, match="--sequence_length 32.*--sequence_length 16"):
        prepare(arguments(**files, sequence_length=16))
    assert content(tmp_path / "out") == before
    (tmp_path / "out" / "manifest.json").write_text("{", encoding="utf-8")
    for overwrite in (False, True):
        with pytest.raises(UserError, match="--dataset_dir"):
            prepare(arguments(), PreparationOptions(overwrite=overwrite))


def test_a_mixture_has_its_weights_and_its_own_validation_files(
    arguments, documents: list[str], tmp_path: Path, capsys
) -> None:
    for name in ("a", "b"):
        for kind, part in (("train", documents[:100]), ("validation", documents[100:])):
            lines = "".join(json.dumps({"text": name + text}) + "\n" for text in part)
            (tmp_path / f"{name}-{kind}.jsonl").write_text(lines, encoding="utf-8")
    source = f"{tmp_path}/a-*.jsonl=3,{tmp_path}/b-*.jsonl=1"
    args = arguments(data_files=[], source=source, split="source", validation_text=True)
    data = prepare(args)
    manifest = data.manifest
    assert [described["weight"] for described in manifest.source["sources"]] == [0.75, 0.25]
    of_train = manifest.counts["train"]
    first, second = (of["tokens"] for of in of_train.sources.values())
    assert first + second == of_train.tokens and first / (first + second) == pytest.approx(0.75, abs=0.02)
    prepare_data.describe(data, max_tokens=0)
    assert f"b-*.jsonl {second / of_train.tokens:.1%}" in capsys.readouterr().out
    lines = Path(args.dataset_dir, "text", "validation.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line)["text"] for line in lines]
    assert [text for text in texts if text.startswith("a")] == ["a" + text for text in documents[100:]]
    of_validation = manifest.counts["validation"]
    assert of_validation.documents == len(texts) and texts[0][0] != texts[1][0]  # interleaved
    assert of_validation.sources[f"{tmp_path}/a-*.jsonl"]["tokens"] / of_validation.tokens == pytest.approx(
        0.75, abs=0.05
    )


def test_each_source_of_a_mixture_has_its_share_of_validation(
    arguments, documents: list[str], tmp_path: Path, content
) -> None:
    for name, texts in (("books", [" ".join(documents[:60]), " ".join(documents[60:120])]), ("web", documents[:120])):
        lines = "".join(json.dumps({"text": f"{name} {text}"}) + "\n" for text in texts)
        (tmp_path / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    form = {"data_files": [], "source": f"{tmp_path}/books.jsonl=7,{tmp_path}/web.jsonl=3", "validation_text": True}
    data = prepare(arguments("one", **form))
    for counts in data.manifest.counts.values():
        books = counts.sources[f"{tmp_path}/books.jsonl"]["tokens"]
        assert books / counts.tokens == pytest.approx(0.7, abs=0.07)
    rows = [open_rows(data.path / name).joined() for name in ("train", "validation")]
    assert data.manifest.reference_losses == reference_losses(*rows, data.manifest.vocab_size)
    texts = (data.path / "text" / "validation.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(texts) == data.manifest.counts["validation"].documents
    prepare(arguments("two", **form), PreparationOptions(num_proc=2))
    assert content(data.path) == content(tmp_path / "two")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"data_files": ["nowhere/*.txt"]}, "nowhere/"),
        ({"data_files": [__file__]}, "test_prepare.py"),
        ({"data_files": [], "source": "finweb-10bt"}, "'fineweb-10bt'"),
        *(
            ({"data_files": [], "source": f"{of},two.jsonl=1"}, of)
            for of in ("one.jsonl=0", "a=nan", "a", "=1", "a=x")
        ),
        ({"tokenizer": "train:many"}, "--tokenizer train:many"),
        ({"tokenizer": "train:100"}, "train:257"),
        ({"tokenizer": "char"}, "--separator none"),
        ({"packing": "wrap", "min_length": 4000, "sequence_length": 5000}, "--min_length"),
        ({"split": "source"}, "--split h"),
        ({"validation_sets": ["Plain=a.txt"]}, "NAME=SOURCE"),
        ({"validation_sets": ["a=embedded", "a=y.txt"]}, "a=y.txt"),
        ({"validation_sets": ["a=nothing.txt"]}, "nothing.txt"),
        ({"dataset_dir": "."}, "--dataset_dir ."),
        ({"dataset_dir": "/dev/null/out"}, "/dev/null/out"),
    ],
)
def test_a_mistake_is_named_and_leaves_nothing(arguments, changes: dict, named: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        prepare(arguments(**changes))
    assert named in str(error.value)
    assert not list(tmp_path.iterdir())


def test_too_little_text_is_refused_and_a_single_document_is_cut(arguments, tmp_path: Path) -> None:
    path = tmp_path / "one.txt"
    one = {"data_files": [str(path)]}
    for repeats, changes in ((1, {}), (12, {}), (12, {"split": "hash"}), (400, {"validation_tokens": 9})):
        path.write_text("one two " * repeats, encoding="utf-8")
        with pytest.raises(UserError, match="validation split .* a row needs 33"):
            prepare(arguments(**one, **changes))
        assert [path.name for path in tmp_path.iterdir()] == ["one.txt"]
    counts = prepare(arguments(**one)).manifest.counts
    assert counts["validation"].documents == counts["train"].documents == 1


def test_a_name_with_brackets_is_a_file_and_a_file_by_two_names_is_read_once(
    arguments, corpus: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(corpus[0].parent)
    (tmp_path / "link [1].jsonl").symlink_to(corpus[1])
    names = ["a.jsonl", *map(str, corpus), str(tmp_path / "link [1].jsonl"), f"../{corpus[0].parent.name}/[a].jsonl"]
    assert prepare(arguments("names", data_files=names)).manifest.sha256 == prepare(arguments("once")).manifest.sha256
    wanted = prepare(arguments("wanted", data_files=[str(corpus[1])])).manifest.sha256
    assert prepare(arguments("link", data_files=[], source=names[3])).manifest.sha256 == wanted


def test_links_are_followed_and_broken_links_are_refused(arguments, corpus: list[Path], tmp_path: Path) -> None:
    wanted = prepare(arguments("wanted")).manifest.sha256
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "more").symlink_to(corpus[1].parent)
    (folder / "more.jsonl").symlink_to(corpus[0])
    (folder / "loop").symlink_to(folder)
    assert prepare(arguments("folder", data_files=[str(folder)])).manifest.sha256 == wanted
    (folder / "gone").symlink_to(tmp_path / "missing")
    for files in (folder, folder / "gone"):
        with pytest.raises(UserError, match="text/gone"):
            prepare(arguments("gone", data_files=[str(files)]))


def test_documents_that_would_be_read_twice_are_refused(arguments, corpus: list[Path], tmp_path: Path) -> None:
    first, second = corpus
    for changes, named in [
        ({"data_files": [], "source": f"{first}=1,{first}=2"}, "a.jsonl"),
        ({"data_files": [], "source": f"{first.parent}/*.jsonl=1,{second}=1"}, "b.jsonl"),
        ({"validation_sets": [f"mine={second}"]}, "'mine'"),
    ]:
        with pytest.raises(UserError, match=named):
            prepare(arguments(**changes))
    assert not list(tmp_path.iterdir())
    prepare(arguments("mixture", data_files=[], source=f"{first}=1,{second}=1"))
    prepare(arguments("set", data_files=[str(first)], validation_sets=[f"mine={second}"]))


def test_the_embedded_corpus_is_prose_of_this_python() -> None:
    topics = [document for batch in Topics().read() for document in batch.documents]
    assert len(topics) > 40 and any("lambda" in topic for topic in topics)
    assert "Implementation of JSONEncoder" in module_docstrings(Path(json.encoder.__file__))


def test_preparing_imports_no_torch(corpus: list[Path], tmp_path: Path, type_command) -> None:
    code = "import sys, prepare_data; prepare_data.main(sys.argv[1:]); assert 'torch' not in sys.modules"
    words = ("--data_files", *corpus, "--dataset_dir", tmp_path / "out", "--tokenizer", "train:300")
    form = ("--num_proc", 1, "--sequence_length", 32, "--validation_tokens", 500)
    done = type_command("python", "-c", code, *words, *form)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "out" / "manifest.json").read_text(encoding="utf-8"))["counts"]["train"]["rows"]
    assert f"{rows:,} rows" in done.stdout


def test_a_locale_without_utf_8_changes_nothing(corpus: list[Path], tmp_path: Path, type_command) -> None:
    locale = ["localedef", "-i", "en_US", "-f", "ISO-8859-1", tmp_path / "en_US.ISO-8859-1"]
    if not shutil.which("localedef") or subprocess.run(locale, check=False, capture_output=True).returncode:
        pytest.skip("localedef cannot make the locale en_US.ISO-8859-1.")
    manifests = []
    for name, code in (("latin", "en_US.ISO-8859-1"), ("utf", "C.UTF-8")):
        options = ("--data_files", *corpus, "--dataset_dir", tmp_path / name, "--tokenizer", "train:300")
        options = (*options, "--encoder", "tokenizers", "--split", "hash", "--validation_fraction", "0.1")
        done = type_command("python", "prepare_data.py", *options, LOCPATH=str(tmp_path), LC_ALL=code)
        assert done.returncode == 0, done.stderr
        manifests.append(json.loads((tmp_path / name / "manifest.json").read_text(encoding="utf-8")))
    assert manifests[0]["sha256"] == manifests[1]["sha256"] and manifests[0]["files"] == manifests[1]["files"]
