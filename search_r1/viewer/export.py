"""One trajectory as a single HTML file that opens without a server: no scripts, all stored text is escaped."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Runs = Sequence[tuple[str, bool]]

_STYLE = Path(__file__).parent / "static" / "style.css"
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"  # of the file: its style is inside
_FACTS = ("status", "data_source", "step", "file", "row", "num_turns", "num_searches", "num_tokens", "weight_version")


def export_html(shown: Row) -> bytes:
    """The HTML, in UTF-8, of what the page gets for a trajectory. A lone surrogate is displayed as U+FFFD."""
    title = shown["question"] or shown["group_id"]
    sections = [
        f'<h1 class="question">{_text(title)}</h1>',
        _facts([(name, shown[name]) for name in _FACTS]),
        _why(shown),
        *map(_search, shown["searches"]),
        *map(_call, shown["calls"]),
        "<h2>Text</h2>",
        *_parts(shown["segments"]),
        _tokens(shown),
    ]
    # The policy lets the file load and run nothing, even if a stored text came through unescaped.
    head = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_text(title)}</title><style>{_STYLE.read_text(encoding='utf-8')}</style></head>"
    )
    page = f"{head}<body><main>{''.join(sections)}</main></body></html>\n"
    return page.encode("utf-8", "xmlcharrefreplace")


def _why(shown: Row) -> str:
    group, rule = shown["group"], shown["rule"]
    # The answer beside the gold ones, then the reward beside those of the prompt's other samples.
    facts = [("answer", shown["answer"]), ("gold", " | ".join(shown["gold"]))]
    if len(group["rows"]) > 1:
        facts.append(("mean reward of the prompt's samples", group["mean_reward"]))
    if group["advantage"] is not None:
        facts.append((f"advantage, {group['formula']}", group["advantage"]))
    sentences = "".join(f"<li>{_text(sentence)}</li>" for sentence in shown["why"])
    # Which components make up the reward, with the rule of each; below them, the function that gave it.
    components = "".join(
        f'<tr><th scope="row">{_text(one["name"])}</th><td>{_text(one["value"])}</td><td>{_text(one["weight"])}</td>'
        f'<td class="rule">{_text(one["text"])}</td></tr>'
        for one in shown["components"]
    )
    head = "".join(f'<th scope="col">{name}</th>' for name in ("Component", "Value", "Weight", "Rule"))
    table = f'<table class="components"><thead><tr>{head}</tr></thead><tbody>{components}</tbody></table>'
    by = f"{rule['function']} {json.dumps(rule['arguments'])}" if rule["function"] else ""
    return (
        f'<section class="why"><h2>Reward {_text(shown["reward"])}</h2><ul>{sentences}</ul>{_facts(facts)}'
        f"{table if components else ''}<p>{_text(by)}</p></section>"
    )


def _search(search: Row) -> str:
    passages = "".join(
        f"<li><strong>{_runs(one['title'])}</strong> <small>{_text(_place(one))}</small>"
        f'<div class="passage">{_runs(one["text"])}</div></li>'
        for one in search["passages"]
    )
    state = "" if search["executed"] else ", not executed"
    return (
        f'<section class="search"><h3>Turn {search["turn"]}: <q>{_text(search["query"])}</q>{state}</h3>'
        f"<ol>{passages}</ol></section>"
    )


def _call(call: Row) -> str:
    asked = f"<code>{_text(call['name'])} {_text(call['arguments'])}</code>"
    return (
        f'<section class="search call"><h3>Turn {call["turn"]}: {asked}, {_text(call["status"])}</h3>'
        f'<div class="passage">{_runs(call["result"])}</div></section>'
    )


def _place(passage: Row) -> str:
    known = [("id", passage["id"]), ("score", passage["score"])]
    return ", ".join(f"{name} {value}" for name, value in known if value is not None)


def _parts(segments: Sequence[Row]) -> Iterator[str]:
    """All parts; several sequences have a heading each, and the context of a further one is folded."""
    number, count = 1, 1 + sum(segment["source"] == "context" for segment in segments)
    if count > 1:
        yield f"<h3>Sequence 1 of {count}</h3>"
    for segment in segments:
        if segment["source"] == "context":
            number += 1
            yield f"<h3>Sequence {number} of {count}</h3>"
            yield _context(segment)
        else:
            yield from (_part(segment, part) for part in segment["parts"])


def _context(segment: Row) -> str:
    first, end = segment["span"]
    bodies = "".join(f'<div class="body">{_runs(part["runs"])}</div>' for part in segment["parts"])
    return (
        f'<details class="part context note"><summary class="kind">context, {end - first} tokens</summary>'
        f"{bodies}</details>"
    )


def _part(segment: Row, part: Row) -> str:
    kind = "prompt" if segment["source"] == "prompt" else part["kind"]
    return (
        f'<section class="part {kind}"><span class="kind">{kind}</span>'
        f'<div class="body">{_runs(part["runs"])}</div></section>'
    )


def _tokens(shown: Row) -> str:
    """A closed section with all tokens; the pointer shows what is stored about each."""
    tokens = shown["tokens"]
    spans = "".join(_token_spans(tokens))
    return (
        "<details><summary>Tokens: trained ones are shaded, the pointer shows id and values</summary>"
        f'<section class="part"><div class="body">{spans}</div></section></details>'
    )


def _token_spans(tokens: Row) -> Iterator[str]:
    texts = tokens["texts"] or [f"{token} " for token in tokens["ids"]]
    for place, (token, text, mask) in enumerate(zip(tokens["ids"], texts, tokens["mask"], strict=True)):
        known = [(name, column[place]) for name, column in tokens["values"].items() if column[place] is not None]
        about = ", ".join([f"token {place}", f"id {token}", *(f"{name} {value}" for name, value in known)])
        yield f'<span class="token {"trained" if mask else "untrained"}" title="{_text(about)}">{_text(text)}</span>'


def _facts(facts: Sequence[tuple[str, Any]]) -> str:
    rows = "".join(f"<div><dt>{_text(name)}</dt><dd>{_text(value)}</dd></div>" for name, value in facts)
    return f'<dl class="facts">{rows}</dl>'


def _runs(runs: Runs) -> str:
    return "".join(f"<mark>{_text(text)}</mark>" if is_gold else _text(text) for text, is_gold in runs)


def _text(value: Any) -> str:
    return "none" if value is None else escape(str(value))
