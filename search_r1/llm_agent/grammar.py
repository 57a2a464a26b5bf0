"""The tags that the policy writes and reads: one `Grammar` for rollout, reward, evaluation and inference.

A turn's action is its first complete `<search>query</search>` or `<answer>text</answer>`. A tag that is only named in a
closed thought ("I will write <answer> tags") opens nothing. What the policy reads after a search is enclosed in
`<information>` tags. The tag names are defined by a prompt template (`search_r1.llm_agent.templates`), so that all code
agrees on them.

All of this takes time in proportion to the text, whatever a policy writes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from verl.errors import ConfigError

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
_BOX = r"\boxed{"
_BRACES = re.compile(r"\\boxed\{|[{}]")
_NAMED = "\0"  # replaces the "<" of a tag that opens nothing


@dataclass(frozen=True)
class Action:
    """A turn's action: `kind` is "search", "answer" or "invalid"; `content` is stripped."""

    kind: str
    content: str = ""


class TagPair(NamedTuple):
    """A tag pair in a text: from `start` to `end` with its tags, from `inner` to `inner_end` without them."""

    name: str
    start: int
    inner: int
    inner_end: int
    end: int


@dataclass(frozen=True)
class Grammar:
    """Tag names. `search` None: no tool, a turn can only answer. `boxed`: the answer is in `\\boxed{}` inside its tags.

    `tags_in_thoughts`: opening tags inside a closed think block act as anywhere else, as published. Raises
    `ConfigError` for an invalid or repeated tag name.
    """

    think: str = "think"
    search: str | None = "search"
    information: str = "information"
    answer: str = "answer"
    boxed: bool = False
    tags_in_thoughts: bool = field(default=False, repr=False)  # prompts, identified by this repr, do not depend on it

    def __post_init__(self) -> None:
        names = self.names
        if not all(_NAME.fullmatch(name) for name in names):
            raise ConfigError(
                f"tags {', '.join(names)}: a tag name is letters, digits, _ and -, and starts with a letter"
            )
        if len({name.lower() for name in names}) != len(names):
            raise ConfigError(f"tags {', '.join(names)}: each needs a name of its own")

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name in (self.think, self.search, self.information, self.answer) if name is not None)

    @property
    def tags(self) -> tuple[str, ...]:
        """All opening and closing tags."""
        return tuple(f"<{slash}{name}>" for name in self.names for slash in ("", "/"))

    def stop_strings(self, search_allowed: bool = True) -> tuple[str, ...]:
        """The strings that end a turn; they are part of the turn."""
        answer = f"</{self.answer}>"
        return (answer,) if self.search is None or not search_allowed else (f"</{self.search}>", answer)

    def parse_action(self, text: str) -> Action:
        """The first complete tag pair in the text. Without one, or with an empty query, the action is invalid."""
        pair = next(pairs(self.acting(text), *self._actions), None)
        if pair is None:
            return Action("invalid")
        kind, content = ("search" if pair.name == self.search else "answer"), text[pair.inner : pair.inner_end].strip()
        return Action("invalid") if kind == "search" and not content else Action(kind, content)

    def extract_answer(self, text: str) -> str | None:
        """The content of the last complete answer tag pair of a policy's turn, stripped; of its last box if `boxed`.

        None without a pair, and without a closed box where there has to be one.
        """
        *_, last = (None, *pairs(self.acting(text), self.answer))
        if last is None:
            return None
        answer = text[last.inner : last.inner_end]
        return last_box(answer) if self.boxed else answer.strip()

    def acting(self, text: str, *more: str) -> str:
        """`text` in which those opening tags are no tags any more that open nothing; its length stays.

        They are those of thoughts, searches and answers, and of the names in `more`, inside a think block that is
        closed. A block that sampling left open still acts.
        """
        if self.tags_in_thoughts:
            return text
        named = re.compile(f"<(?=(?:{'|'.join(map(re.escape, (self.think, *self._actions, *more)))})>)")
        pieces, end = [], 0
        for thought in pairs(text, self.think):
            pieces += [text[end : thought.inner], named.sub(_NAMED, text[thought.inner : thought.inner_end])]
            end = thought.inner_end
        return "".join([*pieces, text[end:]])

    def thoughts(self, text: str) -> list[str]:
        """The contents of a turn's think blocks, stripped."""
        return [text[thought.inner : thought.inner_end].strip() for thought in pairs(text, self.think)]

    def has_thought(self, text: str) -> bool:
        """Whether a turn has a think block that is not empty."""
        return any(self.thoughts(text))

    def wrap_information(self, body: str) -> str:
        """`body` as the policy reads it after a search."""
        return f"\n\n<{self.information}>{body.strip()}</{self.information}>\n\n"

    def unwrap_information(self, observation: str) -> str:
        """The passages of an observation, without the tags around them."""
        return observation.strip().removeprefix(f"<{self.information}>").removesuffix(f"</{self.information}>")

    def example_answer(self, thought: str = "I do not know.", answer: str = "unknown") -> str:
        """An example of a complete turn that answers."""
        answer = f"{_BOX}{answer}}}" if self.boxed else answer
        return f"<{self.think}> {thought} </{self.think}><{self.answer}> {answer} </{self.answer}>"

    def parts(self, text: str) -> Iterator[tuple[str, str]]:
        """(text, "think" | "search" | "answer" | "") pieces of a policy's turn, in order, tags included."""
        end = 0
        kinds = {self.think: "think", self.search: "search", self.answer: "answer"}
        for block in pairs(text, self.think, *self._actions):
            if block.start > end:
                yield text[end : block.start], ""
            yield text[block.start : block.end], kinds[block.name]
            end = block.end
        if end < len(text):
            yield text[end:], ""

    def reasoning(self, text: str) -> str:
        """What a policy's turn has beside its searches and answers, in think tags or not."""
        return " ".join(piece for piece, kind in self.parts(text) if kind in ("think", ""))

    @cached_property
    def _actions(self) -> tuple[str, ...]:
        return (self.answer,) if self.search is None else (self.search, self.answer)


SEARCH_R1 = Grammar()


def pairs(text: str, *names: str) -> Iterator[TagPair]:
    """The complete pairs of these tags, in order: each goes to the first closing tag of its name, and none is inside
    another."""
    end, unclosed = 0, set()
    for opening in re.finditer(f"<({'|'.join(map(re.escape, names))})>", text):
        name = opening.group(1)
        if opening.start() < end or name in unclosed:
            continue
        inner_end = text.find(f"</{name}>", opening.end())
        if inner_end < 0:
            unclosed.add(name)
            continue
        end = inner_end + len(f"</{name}>")
        yield TagPair(name, opening.start(), opening.end(), inner_end, end)


def last_box(text: str) -> str | None:
    """The content of the last closed `\\boxed{...}`, stripped; braces inside it are counted. None without one."""
    last: tuple[int, int] | None = None
    opened: list[tuple[int, bool]] = []  # where the content of each open brace begins, and whether it is a box
    for brace in _BRACES.finditer(text):
        if brace.group() != "}":
            opened.append((brace.end(), brace.group() == _BOX))
        elif opened:
            start, is_box = opened.pop()
            if is_box and (last is None or start > last[0]):
                last = start, brace.start()
    return None if last is None else text[slice(*last)].strip()
