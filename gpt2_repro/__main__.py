"""Run a command of an installed package.

    gpt2-repro COMMAND [options]                      gpt2-repro COMMAND --help lists the options
    gpt2-repro launch CONFIG [options] train ...      train with accelerate launch, in several processes

COMMAND: {}
CONFIG: {}. The options of accelerate launch, such as --num_processes 2, follow it.
"""

import os
import runpy
import sys

from gpt2_repro import __version__, cli
from gpt2_repro.errors import UserError, did_you_mean
from gpt2_repro.launchers import LAUNCHERS


MODULES = {"evaluate": "evaluation"}
COMMANDS = ("prepare", "train", "evaluate", "preflight", "generate", "report", "export", "diagnose", "supervise")


def main() -> None:
    """Run the module of the command that the first word names."""
    name = sys.argv[1] if sys.argv[1:] else "--help"
    if name not in COMMANDS:
        return cli.run(_launch if name == "launch" else _describe)
    del sys.argv[1]
    runpy.run_module(f"gpt2_repro.{MODULES.get(name, name)}", run_name="__main__", alter_sys=True)


def _describe(argv: list[str]) -> None:
    name = argv[0] if argv else "--help"
    if name not in ("--help", "-h", "--version"):
        raise UserError(f"There is no command {name!r}. {did_you_mean(name, [*COMMANDS, 'launch'])}")
    usage = (__doc__ or "").format(", ".join(COMMANDS), ", ".join(LAUNCHERS)).strip()
    print(__version__ if name == "--version" else usage)


def _launch(argv: list[str]) -> None:
    """Replace this process by accelerate launch, with a config that works in any folder."""
    _, config, *words = [*argv, ""]
    if "train" not in words:
        raise UserError("Pass a config and the command, for example: gpt2-repro launch zero1 --num_processes 2 train")
    if config not in LAUNCHERS:
        raise UserError(f"There is no config {config!r}. {did_you_mean(config, LAUNCHERS)}")
    place = words.index("train")
    command = LAUNCHERS[config].command(*words[:place], "-m", "gpt2_repro.train", *words[place + 1 : -1])
    os.execv(sys.executable, command)


if __name__ == "__main__":
    main()
