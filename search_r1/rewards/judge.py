"""The judge: a language model behind an OpenAI-compatible endpoint that scores answers by a rubric.

A rubric is a text file with the slots `{question}`, `{targets}` and `{answer}`, each of them once. A slot is filled
with JSON on one line. A policy's text cannot escape its quotes: JSON escapes quotes and line ends, and the brackets
used by tags and by the control tokens of chat templates are escaped, too.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import re
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import aiohttp

from search_r1.errors import OnlineError
from search_r1.http.response_cache import ResponseCache, request_key
from search_r1.llm_agent.templates import names_in, read_text_file
from search_r1.rewards.chat_endpoint import ADVICE, FORBIDDEN, ChatEndpoint, ChatOptions, EndpointDown, RequestRefused
from search_r1.rewards.component import Value, component
from search_r1.rewards.reading import Reading
from verl.errors import ConfigError, RewardUnavailable
from verl.process.event_loop import end_all

log = logging.getLogger(__name__)
T = TypeVar("T")

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


_DOWN_AFTER = 3  # questions in a row that got no answer at all, or as many as are asked at a time
_END_OF_THOUGHT = "</think>"  # of judges that think aloud before they reply
_SHOWN_CHARS = 200

# The reason comes first: a judge that writes in order then decides after it has said why.
VERDICT_FORMAT = {
    "type": "json_schema",
    "json_schema": {
        "name": "verdict",
        "strict": True,
        "schema": {
            "type": "object",
            "properties": {"reason": {"type": "string"}, "score": {"type": "number"}},
            "required": ["reason", "score"],
            "additionalProperties": False,
        },
    },
}
CHANGES_NO_VERDICT = frozenset({"max_tokens"})  # of a request: a verdict that was not cut is that of any limit


@component("judge")
class Judge:
    """A score from 0 to 1 by the judge; 0, without a request, if there is no answer.

    Equal answers to a question are judged once. A missing verdict is a `RewardUnavailable`. An endpoint that refuses
    the key, path or model raises `ConfigError`: no trajectory of the run could ever be scored.
    """

    scores_while_sampling = True  # most of its time is spent waiting, and it works in any thread

    def __init__(
        self,
        url: str,
        model: str,
        rubric: str = "correctness",
        cache: str | None = None,
        concurrency: int = 32,
        max_answer_chars: int = 2000,
        **endpoint: Any,
    ) -> None:
        """`rubric`: a shipped name or a path; `cache`: a SQLite file; `concurrency`: most requests at once.

        Of a longer answer, only the first `max_answer_chars` are judged. `endpoint`: fields of `ChatOptions`. Raises
        `ConfigError` or `ValueError`.
        """
        if concurrency < 1 or max_answer_chars < 1:
            raise ValueError("concurrency and max_answer_chars must be at least 1")
        self._rubric = load_rubric(rubric)
        self._endpoint = ChatEndpoint(ChatOptions(url, model, **endpoint), VERDICT_FORMAT)
        self._cache = VerdictCache(cache) if cache else None
        self._concurrency = concurrency
        self._max_answer_chars = max_answer_chars
        self._has_answered = False

    async def check(self) -> None:
        """Have one plain answer judged. Raises `ConfigError` or `RewardUnavailable`."""
        async with self._endpoint.client(1) as client:
            await self._check(client)

    async def measure(self, readings: Sequence[Reading]) -> list[Value]:
        """The scores, in the order of `readings`. Raises `ConfigError`."""
        # Equal requests are asked once, and none that is in the cache.
        bodies = [self._body(reading) for reading in readings]
        distinct = {_text(body): body for body in bodies if body is not None}
        scores: dict[str, Value] = {}
        if self._cache is not None:
            stored = {text: self._cache.get(body) for text, body in distinct.items()}
            scores = {text: score for text, score in stored.items() if score is not None}
        # The rest is asked; without an answer there is nothing to judge, and the score is 0.
        missing = {text: body for text, body in distinct.items() if text not in scores}
        scores |= dict(zip(missing, await self._judge(list(missing.values())), strict=True))
        log.info("judge: %d answers, %d distinct, %d of them asked", len(readings), len(distinct), len(missing))
        return [0.0 if body is None else scores[_text(body)] for body in bodies]

    def _body(self, reading: Reading) -> dict[str, Any] | None:
        """The request about an answer; None without one."""
        answer = (reading.answer or "").strip()[: self._max_answer_chars]
        if not answer:
            return None
        return self._endpoint.body(self._rubric.prompt(reading.question, reading.targets, answer))

    async def _judge(self, bodies: Sequence[dict[str, Any]]) -> list[Value]:
        """The scores of distinct requests. A judge that is down is not waited for again and again."""
        slots = asyncio.Semaphore(self._concurrency)
        silences: list[EndpointDown] = []  # since the endpoint last said anything
        most = max(_DOWN_AFTER, self._concurrency)

        async def judge(body: dict[str, Any]) -> Value:
            async with slots:
                # The judge seems to be down: requests that waited for a slot get the last error without a try.
                if len(silences) >= most:
                    return silences[-1]
                try:
                    score: Value = await self._score(client, body)
                except EndpointDown as error:
                    silences.append(error)
                    return error
                except RewardUnavailable as error:
                    score = error
                # A verdict, or a reply that is none: either way the endpoint has said something.
                silences.clear()
                return score

        async with self._endpoint.client(self._concurrency) as client:
            return await _all([judge(body) for body in bodies])

    async def _score(self, client: aiohttp.ClientSession, body: dict[str, Any]) -> float:
        try:
            reply, score = await self._endpoint.ask(client, body, read_score)
        except RequestRefused as refused:
            if not self._has_answered or refused.status == FORBIDDEN:  # a key may be taken back later
                await self._check(client)  # raises where every request is refused, not only this one
            raise RewardUnavailable(str(refused)) from None
        self._has_answered = True
        if self._cache is not None:
            self._cache.put(body, reply)
        return score

    async def _check(self, client: aiohttp.ClientSession) -> None:
        body = self._endpoint.body(self._rubric.prompt("What is two plus two?", ["4", "four"], "4"))
        try:
            await self._endpoint.ask(client, body, read_score)
        except RequestRefused as refused:
            advice = ADVICE.get(refused.status, "check model, max_tokens and extra_body")
            raise ConfigError(f"{refused}; {advice}") from None
        self._has_answered = True


def _text(body: dict[str, Any]) -> str:
    """A request as text that is equal for equal requests."""
    return json.dumps(body, sort_keys=True)


async def _all(jobs: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """The results, or the first error, after which nothing is left running."""
    tasks = [asyncio.ensure_future(job) for job in jobs]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await end_all(tasks)


# Strict parsing of a judge's reply: one JSON object with a score from 0 to 1, or an error.


def read_score(reply: str) -> float:
    """The score of the one JSON object in `reply`; prose or a code fence around it is allowed.

    Raises `ValueError` for a reply without a score from 0 to 1, or with two: a judge that quotes the answer it grades
    must not be misread.
    """
    text = reply.rpartition(_END_OF_THOUGHT)[2]
    try:
        found = [value for value in _objects(text) if "score" in value]
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the reply is not JSON ({error}): {reply[:_SHOWN_CHARS]!r}") from None
    if len(found) != 1:
        raise ValueError(f"the reply has {len(found)} JSON objects with a score, not one: {reply[:_SHOWN_CHARS]!r}")
    score = found[0]["score"]
    if isinstance(score, bool) or not isinstance(score, int | float) or not 0 <= score <= 1:
        raise ValueError(f"score={score!r} is not a number from 0 to 1"[:_SHOWN_CHARS])
    return float(score)


def _objects(text: str) -> Iterator[dict[str, Any]]:
    """The outermost JSON objects. A brace that begins none is an error: the object may have been cut."""
    decoder = json.JSONDecoder(object_pairs_hook=_distinct, strict=False)  # models write line ends in strings as such
    start = text.find("{")
    while start >= 0:
        value, end = decoder.raw_decode(text, start)
        yield value
        start = text.find("{", end)


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands in an object twice")
    return found


# Verdicts in a SQLite file, so that a judge sees each answer once, however often it occurs in one or several runs.


class VerdictCache:
    """Replies keyed by the exact request: model, sampling, rubric, question, targets and answer.

    Only replies with a valid score are stored, and they never expire. Several processes may share the file. If the file
    fails during a run, a warning is logged and the run continues without it.
    """

    def __init__(self, path: str) -> None:
        """Raises `ConfigError` for a file that cannot be used."""
        try:
            self._file = ResponseCache(str(Path(path).expanduser()), math.inf, math.inf)
        except OnlineError as error:
            raise ConfigError(f"judge: {error}") from error

    def get(self, body: dict[str, Any]) -> float | None:
        """The score of the stored reply, or None."""
        try:
            reply = self._file.get(_key(body))
            return None if reply is None else read_score(reply)
        except (OnlineError, ValueError) as error:
            log.warning("a stored verdict cannot be read: %s", error)
            return None

    def put(self, body: dict[str, Any], reply: str) -> None:
        """Store a reply that `read_score` accepts."""
        try:
            self._file.put(_key(body), reply, is_empty=False)
        except OnlineError as error:
            log.warning("a verdict could not be stored: %s", error)


def _key(body: dict[str, Any]) -> Any:
    return request_key("judge", {key: value for key, value in body.items() if key not in CHANGES_NO_VERDICT})
