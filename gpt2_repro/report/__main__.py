"""Write an HTML report of one or more runs and print their main numbers.

    python -m gpt2_repro.report runs/demo
    python -m gpt2_repro.report runs/gpt2_124m runs/gpt2_124m_edu -o report.html
    python -m gpt2_repro.report runs/gpt2_124m --check        exit with code 1 if the run is not healthy

The report contains curves, tables and samples. Only the files of the run directory are read, so the command also
works for a run in progress and for a run directory copied from another machine.
"""

import os
import sys
from pathlib import Path

from gpt2_repro import cli
from gpt2_repro.errors import UserError
from gpt2_repro.report.check import findings
from gpt2_repro.report.page import label_runs, not_comparable, setting_table, summary, write_page
from gpt2_repro.report.read import Run
from gpt2_repro.text import Finding


def main(argv: list[str]) -> None:
    """Write the HTML page, and print a summary of each run.

    With --check, only print the health checks, and exit with code 1 if a run is not healthy.
    """
    parser = cli.CommandParser(prog="python -m gpt2_repro.report", description=__doc__)
    directory = "Run directory, the --output_dir of train.py."
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help=directory)
    where = "Write this HTML file and no PNG figures. (default: RUN/report.html or, for several runs, ./report.html)"
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument("-o", "--output", type=Path, metavar="FILE", help=where)
    modes.add_argument("--check", action="store_true", help="Check whether the runs are healthy; write no files.")
    options = parser.parse(argv)
    runs = [Run(path) for path in options.runs]
    if options.check:
        results: list[Finding] = []
        for run in runs:
            results += findings(run)
        for finding in results:
            print(finding)
        sys.exit(any(finding.mark == "✗" for finding in results))
    output = options.output or _default_output(runs)
    if output.suffix not in (".html", ".htm") or output.is_dir():
        raise UserError(f"-o {output} is not an .html file.")
    os.environ.pop("MPLBACKEND", None)  # matplotlib refuses the backend of Jupyter if it is not installed here
    folder = None
    if not options.output:
        folder = output.with_suffix("")
    write_page(runs, output, folder)
    for run in runs:
        for line in summary(run, output):
            print(line)
    lines = not_comparable(runs)
    if not lines and len(runs) > 1:
        lines = setting_table(runs, label_runs(runs)).lines()
    for line in lines:
        print(line)


def _default_output(runs: list[Run]) -> Path:
    if len(runs) == 1:
        return runs[0].path / "report.html"
    return Path("report.html")


if __name__ == "__main__":
    cli.run(main)
