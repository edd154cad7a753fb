"""Open, check, lock and verify prepared folders.

A prepared folder has the rows of token ids that prepare_data.py wrote.
"""

import contextlib
import dataclasses
import functools
import logging
import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpt2_repro.cli import Progress, words_of
from gpt2_repro.data.arguments import DataArguments
from gpt2_repro.data.recipe import DataRecipe
from gpt2_repro.errors import UserError, in_a_line
from gpt2_repro.files import from_json, read_object, sha256_of, try_lock
from gpt2_repro.launchers import PREPARE
from gpt2_repro.manifest import MANIFEST, Manifest, RowForm
from gpt2_repro.tokenization import ENCODING, load_for_rows


if TYPE_CHECKING:  # slow to import, so these are imported only when the rows or the tokenizer are read
    from transformers import PreTrainedTokenizerBase

    from gpt2_repro.data.rows import Rows


logger = logging.getLogger(__name__)

COPY_AGAIN = "Copy the folder again, or prepare it with --overwrite."


@dataclasses.dataclass(frozen=True)
class PreparedData:
    """A complete prepared folder: its path and its manifest."""

    path: Path
    manifest: Manifest

    @classmethod
    def read(cls, path: str | Path, *, command: str = PREPARE) -> "PreparedData":
        """Open a prepared folder without comparing it with a recipe.

        `command` prepares the folder, for error messages.
        """
        folder = Path(path)
        if not folder.exists():
            raise UserError(f"{folder} does not exist. Prepare the data with `{command}`.")
        try:
            return cls(folder, from_json(Manifest, read_object(folder / MANIFEST)))
        except ValueError:
            problem = f"{folder} is not a prepared folder, because its {MANIFEST} is missing or damaged"
            raise UserError(f"{problem}. Pass another --dataset_dir, or prepare the data with `{command}`.") from None

    @classmethod
    def open(cls, recipe: DataRecipe) -> "PreparedData":
        """Open the prepared folder of a recipe and compare its manifest with the recipe.

        If --dataset_dir was passed, only two kinds of fields are compared: the fields that decide how rows are cut
        (packing, sequence_length, min_length, separator), and the fields on the command line. If the recipe file has no
        other field of `data:` than dataset_dir, only the fields on the command line are compared.

        Raises UserError if the folder is missing or damaged, or was prepared with other values.
        """
        args = recipe.data
        typed = recipe.typed
        passed: dict[str, Any] = {}
        for name, value in vars(args).items():
            if name in typed and name != "dataset_dir":
                passed[name] = value
        command = f"{PREPARE} {shlex.join([str(recipe.path), *words_of(passed)])}"
        if args.source == "files" and not args.data_files:
            command += " --data_files FILE"
        if not args.dataset_dir:
            raise UserError(f"{recipe.path} names no prepared folder. Run `{command}`, and pass its --dataset_dir.")
        fix = f"Pass the value of the folder, or run `{command}` with another --dataset_dir."
        requested = request_of(args)
        written = recipe.written.get("data", {}).keys()
        if "dataset_dir" in typed or written == {"dataset_dir"}:
            command += f" --dataset_dir {shlex.quote(args.dataset_dir)}"
            compared = set(typed)
            if written - {"dataset_dir"}:
                compared |= {field.name for field in dataclasses.fields(RowForm)}
            requested = {key: value for key, value in requested.items() if key in compared}
        data = cls.read(args.dataset_dir, command=command)
        check_request(data.manifest.request, requested, f"{args.dataset_dir} was prepared", fix)
        return data

    @property
    def section(self) -> DataArguments:
        """The recipe section `data:` with which the folder was prepared."""
        return DataArguments(**self.manifest.request, dataset_dir=str(self.path))

    @functools.cached_property
    def tokenizer(self) -> "PreTrainedTokenizerBase":
        """The tokenizer of the prepared folder."""
        self.check_tokenizer()
        try:
            return load_for_rows(self.path / "tokenizer", separator=self.manifest.form.separator)
        except Exception as error:  # `tokenizers` raises plain Exception
            raise UserError(f"{self.path}/tokenizer cannot be read ({in_a_line(error)}). {COPY_AGAIN}") from None

    def rows(self, split: str) -> "Rows":
        """Return the rows of a split.

        Raises UserError if the files or the number of rows do not match the manifest.
        """
        from gpt2_repro.data.rows import open_rows

        self.check_shards(split)
        rows = open_rows(self.path / split, self.manifest.largest_id)
        expected = self.manifest.counts[split].rows
        if len(rows) != expected:
            raise UserError(f"{self.path}/{split} has {len(rows):,} rows, not {expected:,}. {COPY_AGAIN}")
        return rows

    def validation(self, *, eval_tokens: int = 0) -> dict[str, "Rows"]:
        """Return a dict from the name of each validation set to its rows.

        The split `validation` has the name "". The other sets have their names from --validation_sets.

        Args:
            eval_tokens: number of targets (predicted ids) to take from the start of each set, rounded up to complete
                rows. 0 takes all rows.
        """
        counts = self.manifest.counts
        targets = counts["validation"].row_tokens
        if eval_tokens > targets:
            logger.info("validation data has only %s of the %s requested tokens", f"{targets:,}", f"{eval_tokens:,}")
        sets: dict[str, Rows] = {}
        for split in counts:
            if split != "train":
                # The other sets are in splits such as validation_books.
                name = split.removeprefix("validation").removeprefix("_")
                sets[name] = self.rows(split).first(eval_tokens)
        return sets

    def lock(self) -> None:
        """Prevent other processes from replacing the folder until this process ends."""
        # Replacing the memory-mapped files would kill this process with SIGBUS.
        # The descriptor is never closed, so the lock lasts until the process ends.
        if not try_lock(os.open(self.path, os.O_RDONLY), self.path, shared=True):
            raise UserError(f"{self.path} is being replaced. Try again later or pass another --dataset_dir.")

    def check(self) -> None:
        """Raise UserError if a file of the rows or the tokenizer is missing, or has another size."""
        for split in self.manifest.shards:
            self.check_shards(split)
        self.check_tokenizer()

    def check_shards(self, split: str) -> None:
        """Raise UserError if file names, sizes or the fingerprint of a split do not match the manifest."""
        sizes_on_disk = {path.name: path.stat().st_size for path in (self.path / split).glob("*.arrow")}
        expected = {shard.name: shard.bytes for shard in self.manifest.shards[split]}
        for name in sorted({*sizes_on_disk, *expected}):
            if sizes_on_disk.get(name) != expected.get(name):
                sizes = f"{sizes_on_disk.get(name, 0):,} bytes, but {expected.get(name, 0):,} in the manifest"
                raise UserError(f"{self.path / split / name} has {sizes}. {COPY_AGAIN}")
        # A folder of rows from another preparation may have files of the same sizes.
        recorded = fingerprint_of(self.manifest.sha256[split])
        found = read_object(self.path / split / "state.json").get("_fingerprint")
        if found != recorded:
            problem = f"{self.path / split}/state.json has the fingerprint {found}, but the manifest has {recorded}"
            raise UserError(f"{problem}. {COPY_AGAIN}")

    def check_tokenizer(self) -> None:
        """Raise UserError if a file of the tokenizer is missing, or if another version made the ids."""
        for name in self.manifest.files:
            if name.startswith("tokenizer/") and not (self.path / name).is_file():
                raise UserError(f"{self.path / name} is missing. {COPY_AGAIN}")
        if self.manifest.encoding != ENCODING:
            raise UserError(f"Another version of this project wrote {self.path}. Prepare it again with --overwrite.")

    def verify(self) -> None:
        """Read every file, and raise UserError if a hash differs from the manifest."""
        expected = dict(self.manifest.files)
        for split, shards in self.manifest.shards.items():
            self.check_shards(split)
            for shard in shards:
                expected[f"{split}/{shard.name}"] = shard.sha256
        for name, sha256 in Progress(expected.items(), desc="verify", unit="file"):
            file = self.path / name
            if not file.is_file() or sha256_of(file) != sha256:
                raise UserError(f"{file} is missing or differs from the manifest. {COPY_AGAIN}")


def fingerprint_of(sha256: str) -> str:
    """Return the fingerprint that `datasets` has in the folder of a split, from the hash in the manifest."""
    return sha256[:16]


@contextlib.contextmanager
def exclusive_lock(folder: Path, message: str) -> Iterator[None]:
    """Lock a folder, or raise UserError with `message` if another process has locked it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        if not try_lock(descriptor, folder):
            raise UserError(message)
        yield
    finally:
        os.close(descriptor)


def request_of(args: DataArguments) -> dict[str, Any]:
    """Return the fields of `data:` that decide the content of a prepared folder.

    These are all fields except `dataset_dir`. If `data_files` is set, `source` has the value "files".
    """
    request = dataclasses.asdict(args)
    del request["dataset_dir"]
    if args.data_files:
        request["source"] = "files"
    return request


def check_request(recorded: dict[str, Any], requested: dict[str, Any], folder: str, fix: str) -> None:
    """Raise UserError if a requested value differs from the recorded value.

    `folder` is the start of the message, such as "data/books was prepared".
    """
    # A field without a recorded value was added to the project after the folder was prepared: use its default.
    recorded = dataclasses.asdict(DataArguments()) | recorded
    for key, value in requested.items():
        if recorded[key] != value:
            before = str(recorded[key] or "none")[:300]
            now = str(value or "none")[:300]
            raise UserError(f"{folder} with `--{key} {before}`, not with `--{key} {now}`. {fix}")
