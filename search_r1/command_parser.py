"""The parser of a program whose docstring is its help: the first paragraph above the options, the rest below."""

from __future__ import annotations

import argparse


def parser_of(doc: str | None, prog: str | None = None) -> argparse.ArgumentParser:
    """`doc` is the docstring of the program's module."""
    summary, _, rest = (doc or "").partition("\n\n")
    return argparse.ArgumentParser(
        prog=prog, description=summary, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
