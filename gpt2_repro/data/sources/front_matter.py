"""Find the front matter of a Markdown file: a YAML block at its start, with tags and dates instead of text."""

import re


# A key, a comment, an entry of a list, an indented line, or the end of a list or mapping in several lines.
KEY = re.compile(r"""("[^"]*"|'[^']*'|[^\s:#\-\[\]{}][^:]*):(\s.*)?""")
YAML_LINE = re.compile(rf"{KEY.pattern}|#.*|-(\s.*)?|\s.*|[\]}}],?\s*|")
CLOSING = re.compile(r"(---|\.\.\.)[ \t]*")


def without_front_matter(text: str) -> str:
    """Return a text without its front matter and the blank lines after it.

    A text whose first line is `---`, but without a line `---` or `...` after lines that look like YAML, is returned
    unchanged: its first line is a rule between paragraphs.

    Args:
        text: without a byte order mark, with line breaks "\\n".
    """
    if not text.startswith("---"):
        return text
    first, line_break, _ = text.partition("\n")
    if first.rstrip(" \t") != "---" or not line_break:
        return text
    has_key = False
    is_empty = True
    at = len(first) + 1
    while at < len(text):
        end = text.find("\n", at)
        if end < 0:
            end = len(text)
        line = text[at:end]
        at = end + 1
        if CLOSING.fullmatch(line):
            if has_key or is_empty:
                return text[at:].lstrip("\n")
            return text
        if not YAML_LINE.fullmatch(line):
            return text
        if line.strip():
            is_empty = False
        if KEY.fullmatch(line):
            has_key = True
    return text
