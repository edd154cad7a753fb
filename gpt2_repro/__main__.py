"""Prepare data, train, evaluate and report. gpt2-repro COMMAND --help lists the options of a command.

gpt2-repro prepare recipes/own_text.yaml --data_files shakespeare.txt
gpt2-repro train recipes/own_text.yaml --dataset_dir data/shakespeare
gpt2-repro train recipes/gpt2_124m.yaml --config_file zero1.yaml --num_processes 8     with accelerate launch
gpt2-repro evaluate runs/shakespeare
gpt2-repro supervise -- gpt2-repro train --config_file zero1.yaml
"""

import importlib
import os
import sys

from gpt2_repro import cli
from gpt2_repro.errors import UserError, did_you_mean
from gpt2_repro.launchers import ROOT, launch_command


MODULES = {
    "prepare": "gpt2_repro.prepare",
    "train": "gpt2_repro.train",
    "evaluate": "gpt2_repro.evaluation.__main__",
    "report": "gpt2_repro.report.__main__",
    "preflight": "gpt2_repro.preflight.__main__",
    "generate": "gpt2_repro.generate",
    "export": "gpt2_repro.export",
    "diagnose": "gpt2_repro.diagnose",
    "supervise": "gpt2_repro.supervise",
}
WRITES_FILES = ("prepare", "train", "supervise")  # these continue if their output cannot be printed
# Options of accelerate launch that `gpt2-repro train --config_file` passes on.
LAUNCH_OPTIONS = ("num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port")


def main() -> None:
    """Run the command that the first word names."""
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name not in MODULES:
        return cli.run(describe)
    words = sys.argv[2:]
    sys.argv = [f"gpt2-repro {name}", *words]
    if name == "train" and "--config_file" in [word.partition("=")[0] for word in words]:
        return cli.run(launch)
    module = importlib.import_module(MODULES[name])
    cli.run(module.main, prints_results=name not in WRITES_FILES)


def describe(argv: list[str]) -> None:
    """Print the commands, or raise UserError for another word than --help."""
    if argv and argv[0] not in ("--help", "-h"):
        raise UserError(f"There is no command {argv[0]!r}. {did_you_mean(argv[0], MODULES)}")
    print(f"usage: gpt2-repro {{{','.join(MODULES)}}} [options]\n\n{__doc__}")
    print(f"Folder with recipes/ and accelerate_configs/: {ROOT}")


def launch(argv: list[str]) -> None:
    """Replace this process by `accelerate launch`, which starts the training in each process."""
    parser = cli.CommandParser(add_help=False)
    parser.add_argument("--config_file")
    for name in LAUNCH_OPTIONS:
        parser.add_argument(f"--{name}")
    options, words = parser.parse_known_args(argv)
    command = launch_command(options.config_file)
    del options.config_file
    command += cli.words_of(vars(options))
    os.execv(sys.executable, [*command, "-m", "gpt2_repro.train", *words])


if __name__ == "__main__":
    main()
