"""datatrove's token files give the rows of the same documents as text."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from datasets import load_from_disk
from tokenizers import Tokenizer

from gpt2_repro.data.preparation.prepare import prepare
from gpt2_repro.data.sources.token_files import read_header
from gpt2_repro.errors import UserError


END = 299  # the end-of-text id of a tokenizer train:300


def write_datatrove(path: Path, documents: list[list[int]], width: int = 2) -> Path:
    """Write documents as datatrove 0.10 does: ids, and an index with the end of each document."""
    form = {2: "H", 4: "I"}[width]
    ends: list[int] = []
    ids: list[int] = []
    for document in documents:
        ids += document
        ends.append(len(ids))
    path.write_bytes(struct.pack(f"<{len(ids)}{form}", *ids))
    Path(f"{path}.index").write_bytes(struct.pack(f"<{len(ends)}Q", *ends))
    Path(f"{path}.metadata").write_text(f"tokenizer.json|{width}\n{len(ids)}\n{len(ids)}", encoding="utf-8")
    return path


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("separator", ["before", "after", "none"])
@pytest.mark.parametrize("packing", ["concat", "wrap"])
def test_rows_equal_those_of_the_text(
    arguments, corpus: list[Path], tmp_path: Path, caplog, width: int, separator: str, packing: str
) -> None:
    words = {"separator": separator, "packing": packing}
    of_text = prepare(arguments("text", **words))
    tokenizer = Tokenizer.from_file(str(of_text.path / "tokenizer" / "tokenizer.json"))
    tokenizer.encode_special_tokens = True  # a spelled <|endoftext|> is text
    folder = tmp_path / "tokens"
    folder.mkdir()
    for number, path in enumerate(corpus):
        documents: list[list[int]] = []
        for line in path.read_text(encoding="utf-8").splitlines():
            text = json.loads(line)["text"]
            if not text:
                continue  # datatrove leaves out empty documents
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            documents.append({"before": [END, *ids], "after": [*ids, END], "none": ids}[separator])
        write_datatrove(folder / f"{number}_unshuffled.ds", documents, width)
    write_datatrove(folder / "2_unshuffled.ds", [])  # of a task without documents
    words["tokenizer"] = str(of_text.path / "tokenizer")
    caplog.clear()
    of_tokens = prepare(arguments("tokens of datatrove", **words, data_files=[str(folder)]))
    assert of_tokens.manifest.sha256 == of_text.manifest.sha256
    assert of_tokens.manifest.read.longest_document_tokens == of_text.manifest.read.longest_document_tokens
    assert "not used" not in caplog.text  # the files of the index


def test_ids_of_32_bits_are_kept(arguments, tmp_path: Path) -> None:
    ids = np.random.default_rng(0).integers(0, 100_000, 4000)
    path = write_datatrove(tmp_path / "a.ds", [ids[:1500].tolist(), ids[1500:].tolist()], 4)
    words = {"tokenizer": "none:100000", "separator": "none", "sequence_length": 8, "validation_tokens": 400}
    data = prepare(arguments(**words, data_files=[str(path)]))
    rows = load_from_disk(data.path / "train").with_format("numpy")[:]["input_ids"]
    # All of the first document is in validation, or cut at 10 %: 400 tokens.
    expected = [ids[start : start + 9] for start in range(400, len(ids) - 8, 8)]
    assert np.array_equal(rows, expected)


@pytest.mark.parametrize(
    ("ids", "index"),
    [
        (4, None),
        (4, struct.pack("<2Q", 3, 5)),
        (4, struct.pack("<2Q", 3, 3)),
        (4, struct.pack("<3Q", 3, 2, 4)),
        (4, struct.pack("<2Q", 3, 4)[:-1]),
        (4, struct.pack("<2Q", 3, 4) + b"\0"),
        (4, struct.pack("<2I", 3, 4)),
        (4, b""),
        (0, struct.pack("<2Q", 3, 4)),
        (4, struct.pack("<2Q", 3, 2**64 - 1)),
    ],
)
def test_a_missing_or_wrong_index_is_refused(arguments, tmp_path: Path, ids: int, index: bytes | None) -> None:
    path = tmp_path / "a.ds"
    path.write_bytes(struct.pack(f"<{ids}H", *range(ids)))
    if index is not None:
        Path(f"{path}.index").write_bytes(index)
    args = arguments("rows", data_files=[str(path)], tokenizer="none:300", separator="none")
    with pytest.raises(UserError, match=str(path)) as raised:
        prepare(args)
    assert "\n" not in str(raised.value)
    assert not list(tmp_path.glob("rows*"))


def test_other_separators_are_refused(arguments, tmp_path: Path) -> None:
    tokenizer = f"{prepare(arguments('tokenizer')).path}/tokenizer"
    ids = [*range(40, 240)]
    written = {"before": [END, *ids], "after": [*ids, END], "none": ids}
    for shown, document in written.items():
        path = write_datatrove(tmp_path / f"{shown}.ds", [document] * 20)
        for separator in ("before", "after"):
            args = arguments(f"{shown}_{separator}", data_files=[str(path)], tokenizer=tokenizer, separator=separator)
            if shown == separator:
                assert prepare(args).manifest.read.documents == 20
                continue
            with pytest.raises(UserError, match=f"--separator {shown}"):
                prepare(args)
            assert not list(tmp_path.glob(f"{shown}_{separator}*"))


def test_documents_that_were_cut_keep_their_separators(tmp_path: Path) -> None:
    """datatrove's shuffle_chunk_size also divides documents."""
    path = write_datatrove(tmp_path / "a.ds", [[END, 1, 2], [3, 4], [END, 5], [END, 6]])
    part = read_header(path)
    part.check_separators(END, "before")
    assert part.lengths(END, "before").tolist() == [3, 2, 2, 2]


def test_ids_of_another_tokenizer_are_refused(arguments, tmp_path: Path) -> None:
    for width in (2, 4):
        path = write_datatrove(tmp_path / f"{width}.ds", [[*range(250, 350)] * 5], width)
        args = arguments(data_files=[str(path)], tokenizer="none:300", separator="none")
        with pytest.raises(UserError, match="the id 349"):
            prepare(args)
