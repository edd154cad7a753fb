"""A prepared folder: its manifest, tokenizer and splits, opened and checked. Imports nothing slow until rows are read."""

import contextlib
import dataclasses
import fcntl
import functools
import json
import logging
import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpt2_repro.cli import Progress
from gpt2_repro.data.arguments import DataArguments
from gpt2_repro.errors import UserError, in_a_line, nearest
from gpt2_repro.files import read_object, sha256_of
from gpt2_repro.manifest import MANIFEST, Manifest, RowForm
from gpt2_repro.typed_json import from_json


if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from gpt2_repro.data.rows import Rows


logger = logging.getLogger(__name__)

FURTHER = "validation_"  # prefix of the splits of further validation sets


@dataclasses.dataclass(frozen=True)
class PreparedData:
    """A finished prepared folder."""

    path: Path
    manifest: Manifest

    @classmethod
    def read(cls, path: str | Path, *, command: str = "python prepare_data.py") -> "PreparedData":
        """Read the manifest of a folder, whatever it was prepared for.

        Args:
            command: prepares the folder, for the message.

        Raises UserError if the folder is missing or its manifest is missing or damaged.
        """
        folder, file = Path(path), Path(path, MANIFEST)
        if not folder.exists():
            others = [str(path.parent) for path in folder.parent.glob(f"*/{MANIFEST}")]
            hint = f"Did you mean {near}? Else prepare" if (near := nearest(str(folder), others)) else "Prepare"
            raise UserError(f"There is no {folder}. {hint} the data with `{command}`.")
        try:
            return cls(folder, from_json(Manifest, read_object(file)))
        except (TypeError, AttributeError):
            fix = f"Pass the --dataset_dir of a prepared folder, or of a new one and run `{command}`."
            raise UserError(f"{file} is missing or damaged, so this is not a prepared folder. {fix}") from None

    @classmethod
    def open(cls, args: DataArguments, *, typed: Collection[str], recipe: Path) -> "PreparedData":
        """Open the folder of a recipe. A folder that was typed has to fit in its row form and in other typed fields.

        Args:
            typed: names of the fields on the command line.
            recipe: its path, for the message.

        Raises UserError if the folder is missing, damaged or was prepared otherwise.
        """
        if not args.dataset_dir:
            fix = f"Run `python prepare_data.py {recipe} --data_files FILE` and pass the --dataset_dir that it prints."
            raise UserError(f"{recipe} names no data. {fix}")
        its_own = "dataset_dir" in typed
        folder = f" --dataset_dir {args.dataset_dir}" if its_own else ""
        files = " --data_files FILE" if args.source == "files" and not args.data_files else ""
        data = cls.read(args.dataset_dir, command=f"python prepare_data.py {recipe}{files}{folder}")
        request = request_of(args)
        asked = form_of(args) | {key: request[key] for key in request if key in typed} if its_own else request
        if difference := first_difference(data.manifest.request, asked):
            key, holds, value = difference
            option = f" --{key} {value}" if key in typed else ""
            fix = f"Pass --{key} {holds}, or run `python prepare_data.py {recipe}{option}` with another --dataset_dir."
            raise UserError(f"{args.dataset_dir} was prepared with {key} {holds}, not {value}. {fix}")
        return data

    @property
    def section(self) -> DataArguments:
        """The recipe section `data:` that the folder was prepared with."""
        known = {field.name for field in dataclasses.fields(DataArguments)}
        request = {key: value for key, value in self.manifest.request.items() if key in known}
        return DataArguments(**request | {"dataset_dir": str(self.path)})

    @functools.cached_property
    def tokenizer(self) -> "PreTrainedTokenizerBase":
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(str(self.path / "tokenizer"))
        except Exception as error:  # `tokenizers` raises nothing narrower
            fix = "Copy or prepare it again."
            raise UserError(f"{self.path}/tokenizer cannot be read ({in_a_line(error)}). {fix}") from None

    def rows(self, split: str) -> "Rows":
        """The rows of a split. Raises UserError if its files or the number of rows are not the manifest's."""
        from gpt2_repro.data.rows import open_rows

        self.check_shards(split)
        rows, expected = open_rows(self.path / split, self.manifest.largest_id), self.manifest.counts[split].rows
        if len(rows) != expected:
            raise UserError(f"{self.path}/{split} has {len(rows):,} rows, its manifest {expected:,}: prepare it again")
        return rows

    def validation(self, *, eval_tokens: int = 0) -> dict[str, "Rows"]:
        """The rows of each validation set by its name; the main set, `validation/`, has the name "".

        Args:
            eval_tokens: take the first rows of a set that make so many targets; 0 takes all.

        A set with fewer targets is taken whole; for the main set that is logged.
        """
        counts = self.manifest.counts
        if eval_tokens > (targets := counts["validation"].row_tokens):
            logger.info("validation: all %s tokens of the split, not %s", f"{targets:,}", f"{eval_tokens:,}")
        further = [split for split, of_split in counts.items() if split.startswith(FURTHER) and of_split.rows]
        sets = {split.removeprefix(FURTHER): self.rows(split) for split in further}
        return {name: rows.first(eval_tokens) for name, rows in ({"": self.rows("validation")} | sets).items()}

    def lock(self) -> None:
        """Until this process ends, keep others from replacing the folder. Raises UserError if it is being replaced.

        Mapped files that are replaced under a reader end it with SIGBUS. A file system that cannot lock is passed over.
        """
        try:
            # Never closed, so it is locked until the process ends.
            fcntl.flock(os.open(self.path, os.O_RDONLY), fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{self.path} is being replaced: wait for it, or name another --dataset_dir") from None
        except OSError as error:
            logger.warning("%s cannot be locked against being replaced (%s)", self.path, error)

    def check_shards(self, split: str) -> None:
        """Raise UserError if the files of a split are not the manifest's, by name and size. Reads none of them."""
        here = {path.name: path.stat().st_size for path in (self.path / split).glob("*.arrow")}
        expected = {shard.name: shard.bytes for shard in self.manifest.shards[split]}
        for name in sorted(here.keys() | expected.keys()):
            if here.get(name) != expected.get(name):
                wants = f"{expected[name]:,} bytes" if name in expected else "no such file"
                found = f"{here[name]:,}" if name in here else "none"
                file = self.path / split / name
                raise UserError(f"{file} has {found} and its manifest says {wants}: copy or prepare it again")

    def verify(self) -> None:
        """Read every byte again and compare it with the manifest. Raises UserError if they differ."""
        expected = dict(self.manifest.files)
        for split, shards in self.manifest.shards.items():
            self.check_shards(split)
            expected |= {f"{split}/{shard.name}": shard.sha256 for shard in shards}
        for name, sha256 in Progress(expected.items(), desc="verify", unit="file"):
            file = self.path / name
            if not file.is_file() or sha256_of(file) != sha256:
                raise UserError(f"{file} is missing or differs from its manifest: copy or prepare it again")


@contextlib.contextmanager
def exclusive_lock(folder: Path, message: str) -> Iterator[None]:
    """Keep others from reading or changing a folder. Raises UserError with the message if another process holds it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise UserError(message) from None
    finally:
        os.close(descriptor)


def form_of(args: DataArguments) -> dict[str, Any]:
    """The fields that decide the form of a row."""
    return {field.name: getattr(args, field.name) for field in dataclasses.fields(RowForm)}


def request_of(args: DataArguments) -> dict[str, Any]:
    """The fields that decide the content of a prepared folder: all but the folder's own name."""
    request = {k: v for k, v in dataclasses.asdict(args).items() if k not in ("dataset_dir", "source")}
    # Through JSON, as the recorded request went.
    return json.loads(json.dumps({"source": "files" if args.data_files else args.source, **request}))


def first_difference(recorded: dict[str, Any], asked: dict[str, Any]) -> tuple[str, Any, Any] | None:
    """The first key of `asked` that was recorded with another value, that value and the one asked for; None if none.

    A field that a folder does not record was added later, and has its default there.
    """
    recorded = dataclasses.asdict(DataArguments()) | recorded
    for key, value in asked.items():
        if recorded[key] != value:
            return key, _as_typed(recorded[key]), _as_typed(value)
    return None


def _as_typed(value: Any) -> Any:
    """Return a value as it is typed on the command line."""
    return " ".join(value) if isinstance(value, list) else value
