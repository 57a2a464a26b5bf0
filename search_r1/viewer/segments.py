"""Split the text of a trajectory into parts of one kind, and again around gold answers."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

from tokenizers import Tokenizer, decoders

from search_r1.llm_agent.grammar import Grammar
from search_r1.llm_agent.transcript import cut_chat_turn
from search_r1.search.scripts import HANGUL, IDEOGRAPHS, JOINERS, KANA, MARKS, UNSPACED_LETTERS
from search_r1.serve.parts import Part, TurnSplitter, merged
from verl.protocol import IS_SUMMARY, WAITING, Source

MarkedText = tuple[str, bool]  # a text, and whether it is a gold answer
_BETWEEN = r"[^\w]{1,4}"  # words of an answer
_WORD = re.compile(rf"\w[\w{MARKS}{JOINERS}]*")
_UNSPACED = f"{IDEOGRAPHS}{KANA}{HANGUL}{UNSPACED_LETTERS}"
_BEFORE, _AFTER = (
    rf"(?:(?=[{_UNSPACED}])|(?<![^\W{_UNSPACED}]))",
    rf"(?:(?<=[{_UNSPACED}])|(?![^\W{_UNSPACED}]|[{MARKS}]))",
)
_DOCUMENT = re.compile(r"(?=Doc \d+\(Title: )")
_TITLE = re.compile(r'Doc \d+\(Title: "?(.*?)"?\) ?', re.DOTALL)
_GOLD_NAMES = ("target", "golden_answers", "answers", "answer", "ground_truth", "gold", "label", "solution", "value")
Row = dict[str, Any]
Values = list[float | None]

KNOWN = ("log_probs", "old_log_probs", "gap", "kl", "advantages", "weight_version")
_NOT_VALUES = {"ids", "loss_mask"}
_WINDOW = 6  # tokens before one that may change how it is decoded; longer runs of broken bytes are given out


@dataclass(frozen=True)
class ShownPassage:
    """`id`, `score`: None if they were not stored."""

    title: str
    text: str
    id: str | None = None
    score: float | None = None


def gold_answers(stored: str | None) -> list[str]:
    """The gold answers in the stored JSON of `reward_model.ground_truth`, whatever its form; empty if there are none.

    A `target`, which the shipped rewards compare with, is taken as it stands. Other forms are those of data sets of
    others: texts in lists and under the usual names, also as JSON within a text.
    """
    try:
        truth = json.loads(stored or "null")
    except ValueError:
        truth = stored
    if not isinstance(truth, dict) or "target" not in truth:
        return list(_answers(truth))
    targets = truth["target"] if isinstance(truth["target"], list) else [truth["target"]]
    return [str(one) for one in targets if one is not None]


def _answers(truth: Any) -> Iterator[str]:
    # JSON within a text; a text that only looks like it stays as it is.
    if isinstance(truth, str) and truth.lstrip().startswith(("{", '["')):
        with suppress(ValueError):
            truth = json.loads(truth)
    # Of a mapping, the answers are under a usual name, or else in any of its values.
    if isinstance(truth, dict):
        truth = next((truth[name] for name in _GOLD_NAMES if name in truth), list(truth.values()))
    if isinstance(truth, list):
        for one in truth:
            yield from _answers(one)
    elif isinstance(truth, dict):
        yield from _answers(truth)
    elif truth is not None:
        yield str(truth)


class GoldFinder:
    """Finds gold answers in a text: their words in a row, ignoring case and punctuation between them.

    A character of a script without spaces between words, as of Chinese, begins and ends a word anywhere.
    """

    def __init__(self, gold: Sequence[str]) -> None:
        patterns = []
        for answer in gold:
            words = _WORD.findall(answer)
            if words:  # an answer without a letter or digit would be found everywhere
                first = f"(?={re.escape(words[0][0])})"  # before the boundary, which takes longer
                patterns.append(first + _BEFORE + _BETWEEN.join(map(re.escape, words)) + _AFTER)
        self._any = re.compile("|".join(sorted(patterns, key=len, reverse=True)), re.IGNORECASE) if patterns else None

    def runs(self, text: str) -> list[MarkedText]:
        """`text` split into pieces that are gold answers and pieces that are not."""
        return list(self._runs(text))

    def found_in(self, text: str) -> bool:
        return self._any is not None and self._any.search(text) is not None

    def _runs(self, text: str) -> Iterator[MarkedText]:
        end = 0
        for match in self._any.finditer(text) if self._any else ():
            if match.start() > end:
                yield text[end : match.start()], False
            yield match.group(), True
            end = match.end()
        if end < len(text):
            yield text[end:], False


def split_segment(
    source: str, text: str, event: dict[str, Any] | None, grammar: Grammar, texts: Sequence[str] = ()
) -> list[Part]:
    """Parts with the kinds of `search_r1.serve.parts`; for a reply, `event` is that of the turn before it.

    `texts` are those of the tokens, if they are known. Without them, the calls of a chat model are a part of its text.
    """
    if source in (Source.PROMPT, Source.CONTEXT):
        return merged([Part("text", text)])
    # Where a reply was held back, the policy read the request for a summary, which is a turn of its own.
    if event is not None and source == Source.ENVIRONMENT and WAITING in event:
        return merged([Part("feedback", text)])
    if event is not None and event.get(IS_SUMMARY):
        return merged([Part("summary", text)])
    # A chat model: its calls are stored by their tokens, whose texts give the places in the text.
    if event is not None and isinstance(event.get("calls"), list):
        if source == Source.ENVIRONMENT:
            return merged([Part("result" if event["calls"] else "feedback", text)])
        ends = [0, *accumulate(map(len, texts))]
        spans = [call["span"] for call in event["calls"]] if texts else []
        places = [[ends[min(place, len(texts))] for place in span] for span in spans]
        return merged([Part(kind, piece) for kind, piece in cut_chat_turn(text, places, event)])
    # A policy with tags: the grammar says whether its turn is an answer.
    if source == Source.ENVIRONMENT:
        searched = event is not None and event.get("query") is not None and event.get("executed") is not False
        return merged([Part("information" if searched else "feedback", text)])
    splitter = TurnSplitter(grammar)
    parts = splitter.feed(text)
    answers = grammar.parse_action(text).kind == "answer"
    return merged([*parts, *(splitter.end_with_answer() if answers else splitter.end())])


def token_ranges(parts: Sequence[Part], texts: Sequence[str]) -> list[tuple[int, int]]:
    """For each part, its first token and the one after its last; a token belongs to the part in which it begins."""
    starts = list(accumulate(map(len, texts), initial=0))[:-1]
    ranges, token, end = [], 0, 0
    for number, part in enumerate(parts):
        end += len(part.text)
        first = token
        while token < len(starts) and (starts[token] < end or number == len(parts) - 1):
            token += 1
        ranges.append((first, token))
    return ranges


def passages_of(event: dict[str, Any], grammar: Grammar) -> list[ShownPassage]:
    """The passages shown after a search, with ids and scores if they were stored."""
    text = grammar.unwrap_information(str(event.get("observation") or ""))
    shown = [piece for piece in _DOCUMENT.split(text) if piece.strip()]
    if len(shown) > 1 and not _TITLE.match(shown[0]):
        del shown[0]  # the head of one query of several
    ids, scores = _list(event.get("document_ids")), _list(event.get("scores"))
    if ids and not shown:
        shown = [""] * len(ids)
    return [_passage(piece, _at(ids, place), _at(scores, place)) for place, piece in enumerate(shown)]


def _passage(text: str, document_id: Any, score: Any) -> ShownPassage:
    match = _TITLE.match(text)
    title, body = (match.group(1), text[match.end() :]) if match else ("", text)
    if title.endswith(shown_id := f", id: {document_id}"):  # as the tool search shows it, behind the quoted title
        title = title.removesuffix(shown_id).strip('"')
    number = float(score) if isinstance(score, int | float) and not isinstance(score, bool) else None
    return ShownPassage(title, body.rstrip("\n"), None if document_id in (None, "") else str(document_id), number)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _at(values: list[Any], place: int) -> Any:
    return values[place] if place < len(values) else None


# The values that can be overlaid on the tokens of a trajectory, by name.


def token_values(row: Row) -> dict[str, Values]:
    """One number per token, None if there is none: what the file has, and what is derived from it.

    `gap` is the trainer's log-prob minus the sampler's. Files of older runs lack the trainer's log-prob, `kl` and
    `advantages` (`verl.tracking.trajectory_columns`). First the `KNOWN` values, then other columns of the file.
    """
    stored = {name: list(value) for name, value in row.items() if name not in _NOT_VALUES and _is_column(value, row)}
    found = stored | {"weight_version": _versions(row)}
    if "log_probs" in stored:
        # where nothing was trained, the file has 0, which is no log-prob
        masked = zip(row["loss_mask"], stored["log_probs"], strict=True)
        log_probs = found["log_probs"] = [value if trained else None for trained, value in masked]
        if "old_log_probs" in stored:
            both = zip(stored["old_log_probs"], log_probs, strict=True)
            found["gap"] = [None if old is None or new is None else old - new for old, new in both]
    names = [*(name for name in KNOWN if name in found), *(name for name in found if name not in KNOWN)]
    return {name: found[name] for name in names}


def _is_column(value: Any, row: Row) -> bool:
    return (
        isinstance(value, list)
        and len(value) == len(row["ids"])
        and all(one is None or isinstance(one, int | float) for one in value)
    )


def _versions(row: Row) -> Values:
    """The version of the weights that sampled each token: as stored with its segment, else that of the trajectory."""
    found: Values = []
    for segment in row["segments"]:
        if segment["source"] != Source.POLICY:
            found += [None] * segment["num_tokens"]
            continue
        known = segment.get("weight_versions")
        spans = known or [{"version": row["weight_version"], "num_tokens": segment["num_tokens"]}]
        found += [one["version"] for one in spans for _ in range(one["num_tokens"])]
    return found


# The text of each token, such that the texts joined are the text of their segment.


def token_texts(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """One text for each of `ids`; a character that spans several tokens belongs to the last of them."""
    if isinstance(tokenizer.decoder, decoders.ByteLevel):
        return list(_by_bytes(tokenizer, ids))
    return list(_by_windows(tokenizer, ids))


def _by_bytes(tokenizer: Tokenizer, ids: Sequence[int]) -> Iterator[str]:
    """The texts of tokens of a byte-level BPE: a token is bytes, and bytes that are no character become U+FFFD."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    last = len(ids) - 1
    for position, token in enumerate(ids):
        yield decoder.decode(_bytes_of(tokenizer.id_to_token(token) or ""), final=position == last)


def _bytes_of(token: str) -> bytes:
    """The bytes of a token. One with a character outside the byte alphabet is an added token, and stands for itself."""
    alphabet = _alphabet()
    try:
        return bytes(alphabet[letter] for letter in token)
    except KeyError:
        return token.encode("utf-8", "replace")


@lru_cache(maxsize=1)
def _alphabet() -> dict[str, int]:
    """Byte by character, as in GPT-2: printable characters are themselves, the other bytes follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + place): byte for place, byte in enumerate(others)}


def _by_windows(tokenizer: Tokenizer, ids: Sequence[int]) -> Iterator[str]:
    """The texts of tokens of any other tokenizer: what each adds to the decoding of the few before it."""
    start = read = 0
    for end in range(1, len(ids) + 1):
        before = tokenizer.decode(ids[start:read], skip_special_tokens=False)
        text = tokenizer.decode(ids[start:end], skip_special_tokens=False)
        whole = not text.endswith("\ufffd") or end == len(ids) or end - read > _WINDOW
        yield text[len(before) :] if whole else ""
        if whole:
            start, read = read, end
