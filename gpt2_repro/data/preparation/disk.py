"""How much disk a preparation needs, before it begins."""

import logging
import shutil
from collections.abc import Iterable
from pathlib import Path

from gpt2_repro.data.sources.base import SourceFile
from gpt2_repro.data.sources.hub import HubFile
from gpt2_repro.data.sources.local_files import LocalFile
from gpt2_repro.data.sources.presets import peak_bytes
from gpt2_repro.errors import UserError
from gpt2_repro.formatting import size


logger = logging.getLogger(__name__)


# Bytes of text in a byte of the file: FineWeb's parquet 1.6 (46 GB in 28.5), English prose 2.7 by gzip and 3 by zstd.
TEXT_PER_BYTE = {".parquet": 1.6, ".gz": 2.7, ".zst": 3.0}
BYTES_PER_TOKEN = 4.5  # of English web text in GPT-2's ids: 46.0 GB make 9.95B tokens


def tokens_of(file: SourceFile, *, characters: bool) -> float:
    """How many tokens a file will give, about."""
    ending = Path(file.name).suffix
    if ending == ".bin":
        return file.size / 2
    text = file.size * TEXT_PER_BYTE.get(ending, 1.0)
    return text if characters else text / BYTES_PER_TOKEN


def expected_peak(streams: Iterable[tuple[list[SourceFile], int]], *, itemsize: int, characters: bool) -> float:
    """Estimate the most bytes on disk while streams of files are prepared, each up to a limit of tokens (0: all)."""
    staged = rows = downloads = 0.0
    for files, limit in streams:
        tokens = sum(tokens_of(file, characters=characters) for file in files)
        of_stream = itemsize * (min(tokens, limit) if limit else tokens)
        rows += of_stream
        if any(isinstance(file, LocalFile) and file.name.endswith(".bin") for file in files):
            continue  # token files of this disk are read in place
        staged += of_stream
        fetched = [file.size for file in files if isinstance(file, HubFile) and not file.name.endswith(".bin")]
        downloads = max(downloads, sum(sorted(fetched)[-2:]))
    return peak_bytes(staged=staged, rows=rows, downloads=downloads)


def check_disk(target: Path, staging: Path, needed: float) -> None:
    """Raise UserError if the disk is clearly too small. Files of an interrupted preparation count as free."""
    staged = sum(path.stat().st_size for path in staging.rglob("*") if path.is_file())
    free = shutil.disk_usage(staging).free + staged
    logger.info("preparing %s takes about %s of disk at its peak; %s are free", target, size(needed), size(free))
    if 0.8 * needed > free:  # the estimate is of English text
        fix = "Pass another --dataset_dir or fewer --max_tokens."
        raise UserError(f"{target} needs {size(needed)}, and {size(free)} are free. {fix}")
