"""Prompt templates: text files with a grammar, found by name in `templates/` or by path.

    ---
    tags: {information: result}
    boxed: true
    system: You answer questions.
    ---
    Think between <think> and </think> ... Question: {question}

The part between the `---` lines is YAML and optional; the default tags are those of Search-R1. `tags` renames some of
`think`, `search`, `information` and `answer`; `search: null` turns search off. `boxed` requires the answer in
`\\boxed{}` inside its tags. `system` is a separate first message, for models with a chat template. `{question}` must
occur in the text once; `{context}` is replaced by passages that were retrieved beforehand.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from search_r1.llm_agent.grammar import SEARCH_R1, Grammar
from text_file import read_text
from verl.errors import ConfigError, DataError

if TYPE_CHECKING:
    from verl.config.sections.agent import AgentConfig


# In the metadata of a prompt file: the template it was made with.
TEMPLATE_KEY, FINGERPRINT_KEY = "search_r1.template", "search_r1.template_fingerprint"

TEMPLATE_FILE = "template.txt"
"""The copy of its template in the folder of a run."""

_FOLDER = Path(__file__).parent / "templates"
_HEADER = re.compile(r"---[ \t]*\n(.*?\n)?---[ \t]*\n", re.DOTALL)
_SLOT = re.compile(r"\{(question|context)\}")
_KEYS = {"tags": dict, "boxed": bool, "system": str}


@dataclass(frozen=True)
class Template:
    """How a question becomes a prompt, and the grammar of the response. `text` has the placeholders."""

    name: str
    text: str
    grammar: Grammar
    system: str | None = None
    source: str = field(default="", repr=False, compare=False)  # the whole file

    @property
    def needs_context(self) -> bool:
        return "{context}" in self.text

    @property
    def fingerprint(self) -> str:
        """A hash that is equal for templates with the same prompts and the same grammar, whatever their names."""
        return hashlib.sha256(repr((self.text, self.grammar, self.system)).encode()).hexdigest()[:16]

    def messages(self, question: str, context: str | None = None) -> list[dict[str, str]]:
        """The chat messages of a question, as in the `prompt` column of a prompt file.

        Raises `DataError` for an empty question, `ConfigError` if `context` is missing or has no place.
        """
        if self.needs_context != (context is not None):
            raise ConfigError(f"template {self.name} {'needs' if self.needs_context else 'has no place for'} a context")
        values = {"question": normalize_question(question), "context": context or ""}
        user = {"role": "user", "content": _SLOT.sub(lambda slot: values[slot.group(1)], self.text)}
        return [user] if not self.system else [{"role": "system", "content": self.system}, user]


def template_of(agent: AgentConfig) -> Template:
    """The template that a run's config names, with the rule by which it reads tags. Raises as `load_template`."""
    template = load_template(agent.template)
    return replace(template, grammar=replace(template.grammar, tags_in_thoughts=agent.tags_in_thoughts))


def stored_template(folder: Path, named: str) -> str:
    """The template of the run in `folder`: the run's own copy, else the one that is `named` in its config file."""
    own = folder / TEMPLATE_FILE
    return str(own) if own.is_file() else named


def stored_grammar(folder: Path, agent: Mapping[str, Any]) -> Grammar:
    """The grammar of the run in `folder`, whose config file has the section `agent`. Raises as `load_template`."""
    template = stored_template(folder, str(agent.get("template") or ""))
    if not template:
        return SEARCH_R1
    # A run of before there was this key had the published rule.
    tags_in_thoughts = bool(agent.get("tags_in_thoughts", True))
    return replace(load_template(template).grammar, tags_in_thoughts=tags_in_thoughts)


def load_template(name_or_path: str) -> Template:
    """A shipped template, or one from a file. Raises `ConfigError` if it does not exist or is malformed."""
    path, content = read_text_file("template", name_or_path, _FOLDER)
    header, text = _split(content, path)
    for slot, allowed in (("{question}", (1,)), ("{context}", (0, 1))):
        if text.count(slot) not in allowed:
            raise ConfigError(f"{path}: it contains {slot} {text.count(slot)} times, but must contain it once")
    return Template(str(name_or_path), text, _grammar(header, path), header.get("system"), content)


def shipped_templates() -> list[str]:
    """The names of the shipped templates, sorted."""
    return names_in(_FOLDER)


def normalize_question(question: str) -> str:
    """Stripped, with a question mark at its end. Raises `DataError` for an empty question."""
    stripped = question.strip()
    if not stripped:
        raise DataError("the question is empty")
    return stripped if stripped.endswith("?") else f"{stripped}?"


def _split(content: str, path: Path) -> tuple[dict[str, Any], str]:
    match = _HEADER.match(content)
    if match is None:
        return {}, content
    try:
        header = yaml.safe_load(match.group(1) or "") or {}
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: the part between the --- lines is no YAML: {error}") from error
    # A misspelt key would be ignored in silence, so that only known ones are taken.
    if not isinstance(header, dict) or not set(header) <= set(_KEYS):
        raise ConfigError(f"{path}: the part between the --- lines may have the keys {', '.join(_KEYS)} only")
    for key, value in header.items():
        if not isinstance(value, _KEYS[key]):
            raise ConfigError(f"{path}: {key} is {value!r}, but has to be a {_KEYS[key].__name__}")
    return header, content[match.end() :]


def _grammar(header: dict[str, Any], path: Path) -> Grammar:
    tags = header.get("tags", {})
    known = ("think", "search", "information", "answer")
    for key, name in tags.items():
        if key not in known:
            raise ConfigError(f"{path}: there is no tag {key!r}; tags renames some of {', '.join(known)}")
        if not isinstance(name, str) and not (key == "search" and name is None):
            raise ConfigError(f"{path}: the name of tag {key} is {name!r}, but has to be a text")
    try:
        return Grammar(**tags, boxed=header.get("boxed", False))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


# Text files, found by name in a folder of a package, or by path; rubrics of a judge are read alike.


def names_in(folder: Path) -> list[str]:
    """The names of the text files in `folder`, sorted."""
    return sorted(path.stem for path in folder.glob("*.txt"))


def read_text_file(kind: str, name_or_path: str, folder: Path) -> tuple[Path, str]:
    """Path and text of a file in `folder`, or at any path; `kind` is what the `ConfigError` calls it."""
    shipped = folder / f"{name_or_path}.txt"
    path = shipped if shipped.is_file() else Path(name_or_path).expanduser()
    if not path.is_file():
        names = ", ".join(names_in(folder))
        raise ConfigError(f"no {kind} {name_or_path!r}: give the path of a text file, or one of {names}")
    return path, read_text(path, ConfigError)
