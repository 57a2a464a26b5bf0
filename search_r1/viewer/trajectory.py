"""One stored trajectory as the page shows it, and why it got its reward: in sentences, each derived from what was
stored.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import search_r1.rewards
from search_r1.llm_agent.transcript import Turn, chat_reply, final_answer, said_in
from search_r1.rewards.metrics import exact_match, normalize_answer
from search_r1.viewer.runs import RunSettings, load_tokenizer
from search_r1.viewer.segments import (
    GoldFinder,
    ShownPassage,
    Values,
    gold_answers,
    passages_of,
    split_segment,
    token_ranges,
    token_texts,
    token_values,
)
from verl.protocol import IS_SUMMARY, Source, Status, call_status, turns_of_segments, was_search

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


Row = dict[str, Any]

FACTS = (
    "step", "group_id", "data_source", "question", "status", "failure", "reward", "reward_components", "num_turns",
    "num_searches", "weight_version", "prompt_text",
)  # fmt: skip


@dataclass(frozen=True)
class Tokens:
    """`texts`: None without a tokenizer. `values`: see `token_values`."""

    ids: list[int]
    mask: list[bool]
    texts: list[str] | None
    values: dict[str, Values]


def describe(row: Row, settings: RunSettings, kind: str, with_tokens: bool = True) -> Row:
    """The page's content for `row`, all columns of a file: facts, explanation, reward, searches, segments, tokens.

    `kind` is that of the file: validation may use the reward with other arguments.
    """
    # Read the row again as the environment and the reward did.
    parsed = [json.loads(text) for text in row["events"]]
    events = [event if isinstance(event, dict) else {} for event in parsed]
    gold = gold_answers(row["ground_truth"])
    turns = [
        Turn(segment["text"], said=said_in(event or {}))
        for segment, (_, event) in zip(row["segments"], _turns(row, events), strict=True)
        if segment["source"] == Source.POLICY and not (event or {}).get(IS_SUMMARY)
    ]
    answer = final_answer(turns, settings.grammar)
    searches = _searches(events, settings)
    rule = reward_rule(settings, is_training=kind == "train")

    # Put it beside what was stored; gold answers are marked wherever the page shows a text of the episode.
    shown = [search["passages"] for search in searches if search["executed"]]
    tokens = _tokens(row, settings) if with_tokens else None
    finder = GoldFinder(gold)
    return {
        **{name: row.get(name) for name in FACTS},
        "num_tokens": len(row["loss_mask"]),
        "num_policy_tokens": sum(row["loss_mask"]),
        "gold": gold,
        "answer": answer,
        "why": explain(row, answer, gold, shown, events),
        "rule": rule,
        "components": components_of(row, rule),
        "searches": [_shown(search, finder) for search in searches],
        "calls": list(_calls(events, finder)),
        "segments": list(_segments(row, events, settings, finder, tokens)),
        "tokens": None if tokens is None else asdict(tokens),
        "notes": list(settings.notes),
    }


def _searches(events: Sequence[Row], settings: RunSettings) -> list[Row]:
    """Each query, executed or not, with its turn from 1 and the passages it brought."""
    asked = [
        (turn, one) for turn, event in enumerate(events, start=1) for one in event.get("calls") or [event]
    ]  # a turn of a chat model may have several
    return [
        {
            "turn": turn,
            "query": str(event["query"]),
            "executed": was_search(event),
            "ms": event.get("milliseconds"),
            "passages": passages_of(event, settings.grammar) if was_search(event) else [],
        }
        for turn, event in asked
        if event.get("query") is not None
    ]


def _calls(events: Sequence[Row], finder: GoldFinder) -> Iterator[Row]:
    """The tool calls of a chat model, with their turns from 1; `result` is what it read of each, or would have read."""
    for turn, event in enumerate(events, start=1):
        for call in event.get("calls") or ():
            yield {
                "turn": turn,
                "name": str(call["name"]),
                "arguments": json.dumps(call["arguments"], ensure_ascii=False),
                "status": call_status(call),
                "ms": call.get("milliseconds"),
                "result": finder.runs(chat_reply({"calls": [call]}) if "result" in call or call.get("detail") else ""),
            }


def _shown(search: Row, finder: GoldFinder) -> Row:
    """`search` with the texts of its passages cut where a gold answer stands."""
    passages = [
        {**asdict(one), "title": finder.runs(one.title), "text": finder.runs(one.text)} for one in search["passages"]
    ]
    return {**search, "passages": passages}


def _tokens(row: Row, settings: RunSettings) -> Tokens:
    ids = list(row["ids"])
    texts = None
    if settings.tokenizer_file is not None:
        tokenizer = load_tokenizer(settings.tokenizer_file)
        texts = [text for start, end in _spans(row) for text in token_texts(tokenizer, ids[start:end])]
    return Tokens(ids, list(row["loss_mask"]), texts, token_values(row))


def _segments(
    row: Row, events: Sequence[Row], settings: RunSettings, finder: GoldFinder, tokens: Tokens | None
) -> Iterator[Row]:
    """The segments as parts, each with its tokens as [first, one after the last).

    `exact`: the texts of the tokens are that of the segment. `reward`: what the turn was given by itself, if it was.
    """
    rewards = dict(enumerate(row.get("turn_rewards") or ()))
    for segment, (turn, event), (start, end) in zip(row["segments"], _turns(row, events), _spans(row), strict=True):
        # Parts get tokens only if the texts of the tokens are the stored one: else the tokenizer is another one.
        texts = tokens.texts[start:end] if tokens and tokens.texts is not None else []
        exact = "".join(texts) == segment["text"]
        parts = split_segment(segment["source"], segment["text"], event, settings.grammar, texts if exact else ())
        ranges = token_ranges(parts, texts) if exact else [(0, 0)] * len(parts)
        runs_of = finder.runs if segment["source"] != Source.PROMPT else lambda text: [(text, False)]
        yield {
            "source": segment["source"],
            "span": [start, end],
            "exact": exact,
            "parts": [
                {"kind": part.kind, "runs": runs_of(part.text), "tokens": [start + first, start + last]}
                for part, (first, last) in zip(parts, ranges, strict=True)
            ],
            **({"reward": rewards[turn]} if segment["source"] == Source.POLICY and turn in rewards else {}),
        }


def _turns(row: Row, events: Sequence[Row]) -> Iterator[tuple[int, Row | None]]:
    """For each segment the number and the event of its turn."""
    for turn in turns_of_segments((segment["source"] for segment in row["segments"]), events):
        yield turn, events[turn] if 0 <= turn < len(events) else None


def _spans(row: Row) -> list[tuple[int, int]]:
    return list(pairwise(accumulate((segment["num_tokens"] for segment in row["segments"]), initial=0)))
