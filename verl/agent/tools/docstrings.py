"""What a docstring says about a function and its parameters, in the styles of Google, NumPy and Sphinx, or in prose."""

from __future__ import annotations

import inspect
import re
from itertools import pairwise

_OF_PARAMETERS = {"args", "arguments", "parameters", "params", "keyword args", "keyword arguments", "other parameters"}
_OTHERS = {"returns", "return", "yields", "yield", "raises", "attributes", "examples", "example", "notes", "note"} | {
    *("see also", "references", "warnings", "warning", "todo", "methods", "warns", "receives")
}
_UNDERLINE = re.compile(r"\s*-{3,}\s*$")
_GOOGLE_ENTRY = re.compile(r"\*{0,2}(?P<names>\w+)\s*(?:\([^)]*\))?\s*:(?:\s+(?P<text>.*))?$")
_NUMPY_ENTRY = re.compile(r"(?P<names>\*{0,2}\w+(?:\s*,\s*\*{0,2}\w+)*)\s*(?::.*)?(?P<text>)$")
_SPHINX_ENTRY = re.compile(r":(?:param|parameter|arg|argument)\s+(?:[^:]*\s)?\*{0,2}(?P<names>\w+)\s*:\s*(?P<text>.*)$")
_SPHINX_FIELD = re.compile(r":\w+(?:\s[^:]*)?:(?:\s|$)")


def read_docstring(docstring: str | None) -> tuple[str, dict[str, str]]:
    """The description, which is the text before the first section, and the text of each parameter on one line."""
    lines = inspect.cleandoc(docstring or "").splitlines()
    heads = [number for number in range(len(lines)) if _section(lines, number)]
    description = lines[: heads[0]] if heads else lines
    texts: dict[str, str] = {}
    # A section reaches to the next one. Its head takes no line in Sphinx's style, one in Google's, and two in NumPy's.
    for start, end in pairwise([*heads, len(lines)]):
        kind = _section(lines, start)
        if kind == "sphinx":
            texts |= _entries(lines[start:end], _SPHINX_ENTRY)
        elif kind == "google":
            texts |= _entries(lines[start + 1 : end], _GOOGLE_ENTRY)
        elif kind == "numpy":
            texts |= _entries(lines[start + 2 : end], _NUMPY_ENTRY)
    return "\n".join(description).strip(), {name: text for name, text in texts.items() if text}


def _section(lines: list[str], number: int) -> str:
    """What begins at a line: parameters in a style ("google", "numpy", "sphinx"), "other", or "" for nothing."""
    line = lines[number]
    if _SPHINX_FIELD.match(line):
        return "sphinx" if _SPHINX_ENTRY.match(line) else "other"
    if number + 1 < len(lines) and _UNDERLINE.match(lines[number + 1]):
        style, name = "numpy", line.strip().lower()
    elif line.endswith(":") and line[:1].strip():
        style, name = "google", line[:-1].strip().lower()
    else:
        return ""
    return style if name in _OF_PARAMETERS else "other" if name in _OTHERS else ""


def _entries(lines: list[str], pattern: re.Pattern[str]) -> dict[str, str]:
    """The text of each entry. Entries begin at the least indentation; lines that are indented further continue them."""
    filled = [line for line in lines if line.strip()]
    indent = min((len(line) - len(line.lstrip()) for line in filled), default=0)
    texts: dict[str, list[str]] = {}
    current: list[str] = []
    for line in filled:
        entry = pattern.match(line[indent:])
        if entry is not None:
            current = [entry["text"] or ""]
            # Names that share an entry share its lines, also those that follow.
            texts |= {name.strip(" *"): current for name in entry["names"].split(",")}
        elif line[indent] == " " or pattern is _SPHINX_ENTRY:
            # The entry goes on; in Sphinx's style, whatever the indentation.
            current.append(line)
        else:
            break  # prose after the section
    return {name: " ".join(" ".join(parts).split()) for name, parts in texts.items()}
