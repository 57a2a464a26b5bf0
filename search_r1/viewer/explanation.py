"""Why a trajectory got its reward, in sentences, each derived from what was stored."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import search_r1.rewards
from search_r1.rewards.metrics import exact_match
from search_r1.rewards.normalize import normalize_answer
from search_r1.viewer.run_settings import RunSettings
from search_r1.viewer.segments import GoldFinder, ShownPassage
from verl.protocol import Status

_ENDED = {
    Status.TURN_LIMIT: "It ended because its turns were used up.",
    Status.LENGTH_LIMIT: "It ended because its tokens were used up.",
}
_ROOM = "search_r1.rewards"


def explain(
    row: dict[str, Any],
    answer: str | None,
    gold: Sequence[str],
    searches: Sequence[Sequence[ShownPassage]],
    events: Sequence[dict[str, Any]],
) -> list[str]:
    """The sentences. `searches`: the passages of each executed search. `row` has `status`, `failure` and `reward`."""
    if row["status"] == Status.FAILED or row["failure"]:
        return [f"It failed and got no reward: {row['failure'] or 'no reason was stored'}."]
    finder = GoldFinder(gold)
    ending = [sentence for status, sentence in _ENDED.items() if row["status"] == status]
    return [*ending, *_about_answer(answer, gold), *_about_passages(gold, searches, finder), *_actions(events)]


def _about_answer(answer: str | None, gold: Sequence[str]) -> Iterator[str]:
    if answer is None:
        yield "There is no complete answer in any turn, so nothing could be compared with the gold answers."
    elif not gold:
        yield f'The answer is "{answer}"; the row has no gold answers to compare with.'
    elif exact_match(answer, gold):
        yield f'The answer "{answer}" equals a gold answer after normalisation.'
    else:
        wanted = " or ".join(f'"{normalize_answer(one)}"' for one in gold)
        yield f'The answer is "{normalize_answer(answer)}" after normalisation, and not {wanted}.'


def _about_passages(
    gold: Sequence[str], searches: Sequence[Sequence[ShownPassage]], finder: GoldFinder
) -> Iterator[str]:
    """Sentences that tell whether retrieval is to blame, or what was made of its passages."""
    if not gold:
        return
    count = sum(len(passages) for passages in searches)
    if not searches:
        yield "No search was executed."
    elif not count:
        yield f"{_times(len(searches), 'search')} returned no passage."
    else:
        places = [
            f"passage {number} of search {turn}"
            for turn, passages in enumerate(searches, start=1)
            for number, passage in enumerate(passages, start=1)
            if finder.found_in(f"{passage.title}\n{passage.text}")
        ]
        found = f"A gold answer is in {', '.join(places)}."
        yield found if places else f"No gold answer is in what was retrieved ({_times(count, 'passage')})."


def _actions(events: Sequence[dict[str, Any]]) -> Iterator[str]:
    invalid = [str(number) for number, event in enumerate(events, start=1) if event.get("valid") is False]
    if invalid:
        yield f"No valid action in turn {', '.join(invalid)}."
    refused = [str(number) for number, event in enumerate(events, start=1) if event.get("executed") is False]
    if refused:
        yield f"A search in turn {', '.join(refused)} was not executed: it was the last turn."


def _times(count: int, noun: str) -> str:
    plural = f"{noun}es" if noun.endswith("ch") else f"{noun}s"
    return f"{count} {noun if count == 1 else plural}"


# Which rule gave a reward: the config's reward, and what each component measures, from their docstrings.


def reward_rule(settings: RunSettings, is_training: bool) -> dict[str, Any]:
    """`function`, `arguments`, and `text`, the function's docstring ("" if it is not shipped with this project)."""
    function = str(settings.setting("reward.function", ""))
    arguments = settings.setting("reward.kwargs", {})
    if not is_training:
        arguments = settings.setting("reward.val_kwargs", arguments)
    module, _, name = function.rpartition(".")
    text = _classes(module).get(name, "") if module.startswith(_ROOM) else ""
    return {"function": function, "arguments": arguments, "text": text}


def components_of(row: dict[str, Any], rule: dict[str, Any]) -> list[dict[str, Any]]:
    """`name`, `value`, `weight` (None if the reward is not a weighted sum) and `text` of each component of a row."""
    arguments = rule["arguments"] if isinstance(rule["arguments"], dict) else {}
    weights = arguments.get("weights")
    weights = weights if isinstance(weights, dict) else {}
    texts = _component_texts()
    return [
        {"name": name, "value": value, "weight": weights.get(name), "text": texts.get(name, "")}
        for name, value in (row["reward_components"] or {}).items()
    ]


@lru_cache(maxsize=64)
def _classes(module: str) -> dict[str, str]:
    """The docstrings of a shipped module, by class or function; cached, since every trajectory shown needs them."""
    path = _folder().joinpath(*module.removeprefix(_ROOM).split(".")).with_suffix(".py")
    return {node.name: ast.get_docstring(node) or "" for node in _definitions(path)} if path.is_file() else {}


@lru_cache(maxsize=1)
def _component_texts() -> dict[str, str]:
    """Docstrings by the name that `@component("name")` registers."""
    return {
        name: ast.get_docstring(node) or ""
        for path in sorted(_folder().rglob("*.py"))
        for node in _definitions(path)
        if (name := _registered_name(node)) is not None
    }


def _folder() -> Path:
    return Path(search_r1.rewards.__path__[0])


def _definitions(path: Path) -> Iterator[ast.ClassDef | ast.FunctionDef]:
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield node


def _registered_name(node: ast.ClassDef | ast.FunctionDef) -> str | None:
    for mark in node.decorator_list:
        if isinstance(mark, ast.Call) and isinstance(mark.func, ast.Name) and mark.func.id == "component" and mark.args:
            given = mark.args[0]
            return given.value if isinstance(given, ast.Constant) and isinstance(given.value, str) else None
    return None
