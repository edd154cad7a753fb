"""The command line of a command that reads no recipe."""

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from gpt2_repro.errors import UserError, did_you_mean


class CommandParser(argparse.ArgumentParser):
    """argparse whose complaints are UserErrors. Options are never abbreviated; a wrong one names the nearest."""

    def __init__(self, *, prog: str, description: str | None, **kwargs: Any) -> None:
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(prog=prog, description=description, formatter_class=formatter, allow_abbrev=False, **kwargs)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message.removeprefix('argument ')}; see {self.prog} --help")

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """The options. Raises UserError for unknown ones and impossible values."""
        options, unknown = self.parse_known_args(argv)
        if unknown:
            flag = unknown[0].split("=")[0]
            known = [name for action in self._actions for name in action.option_strings if name.startswith("--")]
            raise UserError(f"there is no option {flag}: {did_you_mean(flag, known)}")
        return options
