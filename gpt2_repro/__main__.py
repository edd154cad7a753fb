"""List the commands of the project."""

import ast
from pathlib import Path

from gpt2_repro import cli


COMMANDS = ("generate", "evaluation", "report", "export", "diagnose", "preflight", "supervise")
HEADER = """Commands of the root folder: python prepare_data.py, python train.py and bash evaluate.sh.
Other commands are modules. For example, run: python -m gpt2_repro.generate --help
"""


def main(argv: list[str]) -> None:
    """Print the name and the purpose of each command."""
    print(HEADER)
    for name in COMMANDS:
        file = Path(__file__).with_name(name)
        file = file / "__main__.py" if file.is_dir() else file.with_suffix(".py")
        purpose = (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").partition("\n")[0]
        print(f"  gpt2_repro.{name:<12} {purpose}")


if __name__ == "__main__":
    cli.run(main)
