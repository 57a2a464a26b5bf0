"""The tags that the policy writes and reads: one `Grammar` for rollout, reward, evaluation and inference.

A turn's action is its first complete `<search>query</search>` or `<answer>text</answer>`. What the policy reads after a
search is enclosed in `<information>` tags. The tag names are defined by a prompt template
(`search_r1.llm_agent.templates`), so that all code agrees on them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from verl.errors import ConfigError

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
_BOX = r"\boxed{"


@dataclass(frozen=True)
class Action:
    """A turn's action: `kind` is "search", "answer" or "invalid"; `content` is stripped."""

    kind: str
    content: str = ""


@dataclass(frozen=True)
class Grammar:
    """Tag names. `search` None: no tool, a turn can only answer. `boxed`: the answer is in `\\boxed{}` inside its tags.

    Raises `ConfigError` for an invalid or repeated tag name.
    """

    think: str = "think"
    search: str | None = "search"
    information: str = "information"
    answer: str = "answer"
    boxed: bool = False

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
        match = self._action.search(text)
        if match is None:
            return Action("invalid")
        kind, content = ("search" if match.group(1) == self.search else "answer"), match.group(2).strip()
        return Action("invalid") if kind == "search" and not content else Action(kind, content)

    def extract_answer(self, text: str) -> str | None:
        """The content of the last complete answer tag pair of a policy's turn, stripped; of its last box if `boxed`.

        None without a pair, and without a closed box where there has to be one.
        """
        answers = self._answer.findall(text)
        if not answers:
            return None
        return last_box(answers[-1]) if self.boxed else str(answers[-1]).strip()

    def thoughts(self, text: str) -> list[str]:
        """The contents of a turn's think blocks, stripped."""
        return [str(thought).strip() for thought in self._thought.findall(text)]

    def has_thought(self, text: str) -> bool:
        """Whether a turn has a think block that is not empty."""
        return any(self.thoughts(text))

    def wrap_information(self, body: str) -> str:
        """`body` as the policy reads it after a search."""
        return f"\n\n<{self.information}>{body.strip()}</{self.information}>\n\n"

    def unwrap_information(self, observation: str) -> str:
        """The passages of an observation, without the tags around them."""
        return observation.strip().removeprefix(f"<{self.information}>").removesuffix(f"</{self.information}>")

    def example_answer(self) -> str:
        """An example of a complete turn that answers."""
        answer = f"{_BOX}unknown}}" if self.boxed else "unknown"
        return f"<{self.think}> I do not know. </{self.think}><{self.answer}> {answer} </{self.answer}>"

    def parts(self, text: str) -> Iterator[tuple[str, str]]:
        """(text, "think" | "search" | "answer" | "") pieces of a policy's turn, in order, tags included."""
        end = 0
        kinds = {self.think: "think", self.search: "search", self.answer: "answer"}
        for match in self._block.finditer(text):
            if match.start() > end:
                yield text[end : match.start()], ""
            yield match.group(), kinds[match.group(1)]
            end = match.end()
        if end < len(text):
            yield text[end:], ""

    @cached_property
    def _action(self) -> re.Pattern[str]:
        return _pair(*(name for name in (self.search, self.answer) if name is not None))

    @cached_property
    def _block(self) -> re.Pattern[str]:
        return _pair(*(name for name in (self.think, self.search, self.answer) if name is not None))

    @cached_property
    def _answer(self) -> re.Pattern[str]:
        return re.compile(f"<{self.answer}>(.*?)</{self.answer}>", re.DOTALL)

    @cached_property
    def _thought(self) -> re.Pattern[str]:
        return re.compile(f"<{self.think}>(.*?)</{self.think}>", re.DOTALL)


SEARCH_R1 = Grammar()


def last_box(text: str) -> str | None:
    """The content of the last closed `\\boxed{...}`, stripped; braces inside it are counted. None without one."""
    start = text.rfind(_BOX)
    while start >= 0:
        content = _braced(text[start + len(_BOX) :])
        if content is not None:
            return content.strip()
        start = text.rfind(_BOX, 0, start)
    return None


def _braced(text: str) -> str | None:
    """`text` up to the brace that closes one opened before it."""
    depth = 1
    for position, letter in enumerate(text):
        depth += (letter == "{") - (letter == "}")
        if depth == 0:
            return text[:position]
    return None


def _pair(*names: str) -> re.Pattern[str]:
    return re.compile(rf"<({'|'.join(map(re.escape, names))})>(.*?)</\1>", re.DOTALL)
