"""Parse mixtures of sources, such as `fineweb-10bt=0.7,own/*.jsonl=0.3`."""

import dataclasses
import glob
import re
from fractions import Fraction

from gpt2_repro.errors import UserError


FORM = "SOURCE[#COLUMN]=SHARE[xPASSES], such as fineweb-10bt=0.7,own/*.jsonl=0.3x2"
_SHARE = r"=(?P<share>\d+(\.\d*)?|\.\d+)(x(?P<passes>\d+))?"
_PART = re.compile(rf"(?P<source>.+){_SHARE}")
_HAS_SHARE = re.compile(rf"{_SHARE}(,|$)")


@dataclasses.dataclass(frozen=True)
class MixturePart:
    """A source of a mixture."""

    source: str  # as it was passed, with its #COLUMN
    share: Fraction  # of the tokens of the training split; the shares of a mixture have the sum 1
    passes: int = 1  # how often a document may be used at most

    @property
    def name(self) -> str:
        """The source without its #COLUMN."""
        return self.source.partition("#")[0]


def parse_mixture(text: str) -> list[MixturePart]:
    """Return the parts of a mixture, or an empty list if `text` names a single source.

    The name of an existing file is a single source, and so is a glob that matches files. Raises UserError if a part has
    no share, or if a source is named twice.
    """
    if not _HAS_SHARE.search(text) or glob.glob(glob.escape(text)) or glob.glob(text, recursive=True):
        return []
    parts: list[MixturePart] = []
    for piece in text.split(","):
        match = _PART.fullmatch(piece.strip())
        if match is None:
            raise UserError(f"{piece!r} of --source {text} has no share. Pass {FORM}.")
        source = match["source"]
        share = Fraction(match["share"])
        passes = int(match["passes"] or 1)
        if not share or not passes:
            raise UserError(f"{piece!r} of --source {text} must have a share and a number of passes above 0.")
        if any(part.source == source for part in parts):
            raise UserError(f"--source {text} has {source} twice. Pass {source}=SHARExPASSES to repeat a source.")
        parts.append(MixturePart(source, share, passes))
    total = sum(part.share for part in parts)
    return [dataclasses.replace(part, share=part.share / total) for part in parts]
