"""One stored trajectory as the page shows it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from typing import Any

from search_r1.llm_agent.transcript import Turn, final_answer
from search_r1.viewer.explanation import components_of, explain, reward_rule
from search_r1.viewer.run_settings import RunSettings, load_tokenizer
from search_r1.viewer.segments import (
    GoldFinder,
    Values,
    gold_answers,
    passages_of,
    split_segment,
    token_ranges,
    token_texts,
    token_values,
)
from verl.protocol import Source, was_search

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
    answer = final_answer([Turn(s["text"]) for s in row["segments"] if s["source"] == Source.POLICY], settings.grammar)
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
        "segments": list(_segments(row, events, settings, finder, tokens)),
        "tokens": None if tokens is None else asdict(tokens),
        "notes": list(settings.notes),
    }


def _searches(events: Sequence[Row], settings: RunSettings) -> list[Row]:
    """Each query, executed or not, with its turn from 1 and the passages it brought."""
    return [
        {
            "turn": turn,
            "query": str(event["query"]),
            "executed": was_search(event),
            "ms": event.get("milliseconds"),
            "passages": passages_of(event, settings.grammar) if was_search(event) else [],
        }
        for turn, event in enumerate(events, start=1)
        if event.get("query") is not None
    ]


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

    `exact`: whether the texts of the tokens are the text of the segment.
    """
    replies = _events_of_segments(row, events)
    for segment, event, (start, end) in zip(row["segments"], replies, _spans(row), strict=True):
        parts = split_segment(segment["source"], segment["text"], event, settings.grammar)
        texts = tokens.texts[start:end] if tokens and tokens.texts is not None else []
        exact = "".join(texts) == segment["text"]
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
        }


def _events_of_segments(row: Row, events: Sequence[Row]) -> Iterator[Row | None]:
    """For each segment the event of its turn. A turn in which no token was sampled has an event, but no segment."""
    turn, answered = -1, True
    for segment in row["segments"]:
        if segment["source"] == Source.POLICY or (segment["source"] == Source.ENVIRONMENT and answered):
            turn += 1
        answered = segment["source"] == Source.ENVIRONMENT or (answered and segment["source"] == Source.PROMPT)
        yield events[turn] if 0 <= turn < len(events) else None


def _spans(row: Row) -> list[tuple[int, int]]:
    return list(pairwise(accumulate((segment["num_tokens"] for segment in row["segments"]), initial=0)))
