"""Rubrics of a judge: text files with the slots `{question}`, `{targets}` and `{answer}`, each of them once.

A slot is filled with JSON on one line. A policy's text cannot escape its quotes: JSON escapes quotes and line ends, and
the brackets used by tags and by the control tokens of chat templates are escaped, too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from search_r1.llm_agent.templates import names_in, read_text_file
from verl.errors import ConfigError

_FOLDER = Path(__file__).parent / "rubrics"
_SLOTS = ("{question}", "{targets}", "{answer}")
_SLOT = re.compile("|".join(map(re.escape, _SLOTS)))
_BRACKETS = {ord(bracket): f"\\u{ord(bracket):04x}" for bracket in "<>[]"}


@dataclass(frozen=True)
class Rubric:
    """The grading instructions for a judge. `text` has the slots."""

    name: str
    text: str

    def prompt(self, question: str, targets: Sequence[str], answer: str) -> str:
        """`text` with its slots filled."""
        values = {
            "{question}": quoted(question),
            "{targets}": f"[{', '.join(map(quoted, targets))}]",
            "{answer}": quoted(answer),
        }
        return _SLOT.sub(lambda slot: values[slot.group()], self.text)


def load_rubric(name_or_path: str) -> Rubric:
    """A shipped rubric, or one from a file. Raises `ConfigError` if it does not exist or is invalid."""
    path, text = read_text_file("rubric", name_or_path, _FOLDER)
    for slot in _SLOTS:
        if text.count(slot) != 1:
            raise ConfigError(f"rubric {path}: it contains {slot} {text.count(slot)} times, but must contain it once")
    if '"score"' not in text:
        raise ConfigError(f'rubric {path}: it has to ask for a JSON object with the key "score", a number from 0 to 1')
    return Rubric(str(name_or_path), text)


def shipped_rubrics() -> list[str]:
    """The names of the shipped rubrics."""
    return names_in(_FOLDER)


def quoted(text: str) -> str:
    """A JSON string on one line, without any of `<>[]`; lone surrogates, which no server accepts, become "?"."""
    text = text.encode("utf-8", "replace").decode("utf-8")
    return json.dumps(text, ensure_ascii=False).translate(_BRACKETS)
