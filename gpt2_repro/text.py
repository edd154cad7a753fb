"""Format numbers, durations and tables for people."""

import datetime
from typing import Literal, NamedTuple


def size(count: float) -> str:
    """Return a number of bytes as text, such as `1.2 GB` or `340 MB`."""
    if count >= 1e9:
        return f"{count / 1e9:.1f} GB"
    return f"{count / 1e6:.0f} MB"


def count(number: float | None) -> str:
    """Return a number as text, such as `9.89 B` or `16,384`, or a dash for None."""
    if number is None:
        return "–"
    if abs(number) >= 1e9:
        return f"{number / 1e9:.2f} B"
    if abs(number) >= 1e6:
        return f"{number / 1e6:.1f} M"
    return f"{number:,.0f}"


def duration(seconds: float | None) -> str:
    """Return a duration as text, such as `4 min 12 s` or `3 h 05 min`."""
    if seconds is None:
        return "–"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes_rest = divmod(minutes, 60)
    if not minutes:
        return f"{rest} s"
    if not hours:
        if not rest:
            return f"{minutes} min"
        return f"{minutes} min {rest:02} s"
    if hours < 48:
        return f"{hours} h {minutes_rest:02} min"
    return f"{hours // 24} d {hours % 24} h"


def in_terminal(text: str, most: int) -> str:
    """Return a text on one line of at most `most` characters, without control characters of terminals."""
    line = ""
    for character in " ".join(text.split()):
        line += character if character.isprintable() else "\N{REPLACEMENT CHARACTER}"
    if len(line) > most:
        return f"{line[:most]}…"
    return line


def now() -> str:
    """Return the current UTC time in ISO format, without fractions of a second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


class Finding(NamedTuple):
    """The result of a check: ✓ good, ! a note, ✗ a failure that needs an action."""

    mark: Literal["✓", "!", "✗"]
    about: str
    text: str

    def __str__(self) -> str:
        return f"{self.mark} {self.about:<16} {self.text}"


# Characters of tables that LaTeX's fonts lack.
IN_LATEX = {"±": r"$\pm$", "−": r"$-$", "–": "--", "↑": r"$\uparrow$", "↓": r"$\downarrow$"}


class Cell(NamedTuple):
    """A table cell. `kind`: "", "number", or "better", "worse" or "even"."""

    text: str
    kind: str = ""


class Table(NamedTuple):
    """A table: column headers and rows of cells."""

    headers: list[str]
    rows: list[list[Cell]]

    def markdown(self) -> str:
        """Return the table as Markdown, with numbers right-aligned."""
        first = self._first_column_of_numbers()
        rule = ["---"] * first + ["---:"] * (len(self.headers) - first)
        rows = [self.headers, rule]
        for row in self.rows:
            rows.append([cell.text for cell in row])
        lines = [f"| {' | '.join(cells)} |" for cells in rows]
        return "\n".join(lines)

    def latex(self) -> str:
        """Return the table as a LaTeX `tabular`, with the rules of the package booktabs and numbers right-aligned."""
        import pandas

        first = self._first_column_of_numbers()
        texts = [[cell.text for cell in row] for row in self.rows]
        frame = pandas.DataFrame(texts, columns=self.headers)
        columns = "l" * first + "r" * (len(self.headers) - first)
        text: str = frame.to_latex(index=False, escape=True, column_format=columns)
        for character, command in IN_LATEX.items():
            text = text.replace(character, command)
        return text

    def _first_column_of_numbers(self) -> int:
        for row in self.rows:
            kinds = [cell.kind for cell in row]
            if "number" in kinds:
                return kinds.index("number")
        return 1

    def lines(self) -> list[str]:
        """Return the table as aligned lines of text, with numbers right-aligned."""
        lines = [""] * (1 + len(self.rows))
        for column, header in enumerate(self.headers):
            cells = [row[column] for row in self.rows]
            kind = cells[0].kind if cells else ""
            cells.insert(0, Cell(header, kind))
            width = max(len(cell.text) for cell in cells)
            for number, cell in enumerate(cells):
                text = cell.text.ljust(width)
                if cell.kind == "number":
                    text = cell.text.rjust(width)
                lines[number] += f"{text}  "
        return [line.rstrip() for line in lines]
