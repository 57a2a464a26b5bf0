"""Prompt templates: text files in which `{question}` stands once, found by name in `templates/` or by path."""

from __future__ import annotations

from pathlib import Path

from verl.errors import ConfigError, DataError

_FOLDER = Path(__file__).parent / "templates"
_SLOT = "{question}"


def load_template(name_or_path: str) -> str:
    """The text of a shipped template or of a file. Raises `ConfigError` when there is none, or its slot is not once."""
    shipped = _FOLDER / f"{name_or_path}.txt"
    path = shipped if shipped.is_file() else Path(name_or_path).expanduser()
    if not path.is_file():
        names = ", ".join(sorted(file.stem for file in _FOLDER.glob("*.txt")))
        raise ConfigError(f"no template {name_or_path!r}: give the path of a text file, or one of {names}")
    template = path.read_text(encoding="utf-8")
    if template.count(_SLOT) != 1:
        raise ConfigError(f"{path}: {_SLOT} stands in it {template.count(_SLOT)} times, but has to stand once")
    return template


def normalize_question(question: str) -> str:
    """Stripped, with a question mark at its end. Raises `DataError` for an empty question."""
    stripped = question.strip()
    if not stripped:
        raise DataError("the question is empty")
    return stripped if stripped.endswith("?") else f"{stripped}?"


def render(template: str, question: str) -> list[dict[str, str]]:
    """The chat messages of a question: what stands in the `prompt` column of a prompt file."""
    return [{"role": "user", "content": template.replace(_SLOT, normalize_question(question))}]
