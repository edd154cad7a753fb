"""Write an HTML report of one or more runs and print their main numbers.

    python -m gpt2_repro.report runs/demo
    python -m gpt2_repro.report runs/gpt2_124m runs/gpt2_124m_edu -o report.html
    python -m gpt2_repro.report runs/ladder/* --table latex   also write a table of the runs
    python -m gpt2_repro.report runs/gpt2_124m --follow       write the page again until the run ends
    python -m gpt2_repro.report runs/gpt2_124m --check        exit with code 1 if the run is not healthy

The report contains curves, tables and samples. Only the files of the run directory are read, so the command also
works for a run in progress and for a run directory copied from another machine.
"""

import os
import sys
import time
from pathlib import Path

from gpt2_repro import cli
from gpt2_repro.errors import UserError
from gpt2_repro.report.check import findings, headline
from gpt2_repro.report.ending import progress
from gpt2_repro.report.page import REFRESH, label_runs, not_comparable, require_own_page, summary, write_page
from gpt2_repro.report.read import Run
from gpt2_repro.report.seeds import setting_table
from gpt2_repro.report.tables import TABLES, table_path, write_table
from gpt2_repro.text import Finding


def main(argv: list[str]) -> None:
    """Write the HTML page, and print a summary of each run.

    With --check, only print the health checks, and exit with code 1 if a run is not healthy.
    """
    parser = cli.CommandParser(prog="python -m gpt2_repro.report", description=__doc__)
    directory = "Run directory, the --output_dir of train.py."
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help=directory)
    where = "Write this HTML file and no figures. (default: RUN/report.html or, for several runs, ./report.html)"
    table = "Also write a table of the runs next to the page: report.csv with a line per run, or report.tex (for the "
    table += "package booktabs) or report.md with a line per setting, the mean ± standard deviation of its seeds."
    follow = f"Write the page again every {REFRESH} seconds until no run is running. A browser reloads it by itself."
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument("-o", "--output", type=Path, metavar="FILE", help=where)
    modes.add_argument("--check", action="store_true", help="Check whether the runs are healthy; write no files.")
    parser.add_argument("--table", choices=TABLES, help=table)
    parser.add_argument("--follow", action="store_true", help=follow)
    options = parser.parse(argv)
    runs = [Run(path) for path in options.runs]
    if options.check:
        if options.follow or options.table:
            raise UserError("--check writes no files. Pass it without --follow and --table.")
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
        if len(runs) > 1:
            require_own_page(output, folder)
    table_file = None
    if options.table:
        table_file = table_path(output, options.table)
    write_page(runs, output, folder)
    _print_summary(runs, output)
    while options.follow and any(run.is_live for run in runs):
        time.sleep(REFRESH)
        runs = [Run(path) for path in options.runs]
        write_page(runs, output, folder)
        for run in runs:
            print(f"{run.name}: {run.status.state}, {progress(run)}. {headline(run).text}", flush=True)
    if table_file:
        write_table(runs, label_runs(runs), table_file, options.table)
        print(f"Written: {table_file}")


def _print_summary(runs: list[Run], page: Path) -> None:
    for run in runs:
        for line in summary(run, page):
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
