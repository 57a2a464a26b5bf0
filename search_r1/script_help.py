"""The help of a script, read from its source: a benchmark's own `--help` imports torch first, which takes seconds.

It consists of the script's docstring and the options that it adds to its parser.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterator
from pathlib import Path


def help_of(script: Path) -> str:
    """The help text. Raises SyntaxError if `script` is not Python."""
    tree = ast.parse(script.read_text(encoding="utf-8"))
    options = "\n".join(_lines(tree))
    return f"{ast.get_docstring(tree) or ''}\n\noptions:\n{options}\n"


def _lines(tree: ast.AST) -> Iterator[str]:
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    for call in sorted((one for one in calls if _names(one)), key=lambda one: (one.lineno, one.col_offset)):
        given = {word.arg: word.value for word in call.keywords}
        told = [_text(given["help"])] if "help" in given else []
        if "required" in given and ast.unparse(given["required"]) == "True":
            told.append("(required)")
        elif "default" in given and "%(default)s" not in "".join(told):
            told.append(f"(default: {ast.unparse(given['default'])})")
        line = f"  {', '.join(_names(call)):<24} {' '.join(told)}".rstrip()
        yield line.replace("%(default)s", ast.unparse(given["default"]) if "default" in given else "none")


def _names(call: ast.Call) -> list[str]:
    """`--seed` of `parser.add_argument("--seed", ...)`, or of `add("--seed", ...)`; empty for any other call."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    words = [one.value for one in call.args if isinstance(one, ast.Constant) and isinstance(one.value, str)]
    if name == "add_argument":
        return words
    return [word for word in words if word.startswith("-")] if name == "add" else []


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(one) if isinstance(one, ast.Constant) else "..." for one in node.values)
    return ast.unparse(node)


# The parser of a program whose docstring is its help: the first paragraph above the options, the rest below.


def parser_of(doc: str | None, prog: str | None = None) -> argparse.ArgumentParser:
    """`doc` is the docstring of the program's module."""
    summary, _, rest = (doc or "").partition("\n\n")
    return argparse.ArgumentParser(
        prog=prog, description=summary, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
