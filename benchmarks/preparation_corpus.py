"""Write the text for data_preparation.py to parquet and jsonl files."""

import gzip
import json
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet


DOCUMENT_BYTES = 4500
ROW_GROUP = 1000  # rows


def read_documents(prose: Path) -> list[str]:
    """Read novels and web pages, and return their documents in random order."""
    documents = []
    for name, is_whole in (("novels", False), ("gov_web", True)):
        with gzip.open(prose / f"{name}.jsonl.gz", "rt", encoding="utf-8") as lines:
            for line in lines:
                text = json.loads(line)["text"]
                documents += [text] if is_whole else cut(text)
    documents = [document for document in documents if document.strip() and "<|endoftext|>" not in document]
    random.Random(0).shuffle(documents)
    return documents


def cut(text: str) -> list[str]:
    """Cut text at paragraph ends into pieces of about DOCUMENT_BYTES bytes."""
    pieces, held, size = [], [], 0
    for paragraph in text.replace("\n\n", "\n\n\0").split("\0"):
        length = len(paragraph.encode())
        if held and size + length / 2 > DOCUMENT_BYTES:
            pieces.append("".join(held))
            held, size = [], 0
        held.append(paragraph)
        size += length
    return [*pieces, "".join(held)]


def write_corpus(folder: Path, documents: list[str], copies: int, files: int, compression: str) -> list[int]:
    """Write the documents to `files` parquet files and again to `files` jsonl files.

    Returns the size of the text of each file in UTF-8 bytes.
    """
    folder.mkdir()
    everything = documents * copies
    sizes = []
    for number in range(files):
        part = everything[len(everything) * number // files : len(everything) * (number + 1) // files]
        sizes.append(sum(len(document.encode()) for document in part))
        path = folder / f"part-{number:04d}.parquet"
        pyarrow.parquet.write_table(pa.table({"text": part}), path, compression=compression, row_group_size=ROW_GROUP)
        with path.with_suffix(".jsonl").open("w", encoding="utf-8") as out:
            out.writelines(json.dumps({"text": document}, ensure_ascii=False) + "\n" for document in part)
    return sizes
