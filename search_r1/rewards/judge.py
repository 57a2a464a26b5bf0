"""The judge: a language model behind an OpenAI-compatible endpoint that scores answers by a rubric."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

import aiohttp

from search_r1.rewards.chat_endpoint import ChatEndpoint, ChatOptions, EndpointDown, RequestRefused
from search_r1.rewards.component import Value, component
from search_r1.rewards.reading import Reading
from search_r1.rewards.rubric import load_rubric
from search_r1.rewards.verdict import VERDICT_FORMAT, read_score
from search_r1.rewards.verdict_cache import VerdictCache
from verl.errors import ConfigError, RewardUnavailable
from verl.process.event_loop import end_all

log = logging.getLogger(__name__)
T = TypeVar("T")

_DOWN_AFTER = 3  # questions in a row that got no answer at all, or as many as are asked at a time


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
        bodies = [self._body(reading) for reading in readings]
        distinct = {_text(body): body for body in bodies if body is not None}
        scores: dict[str, Value] = {}
        if self._cache is not None:
            stored = {text: self._cache.get(body) for text, body in distinct.items()}
            scores = {text: score for text, score in stored.items() if score is not None}
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
                if len(silences) >= most:
                    return silences[-1]
                try:
                    score: Value = await self._score(client, body)
                except EndpointDown as error:
                    silences.append(error)
                    return error
                except RewardUnavailable as error:
                    score = error
                silences.clear()
                return score

        async with self._endpoint.client(self._concurrency) as client:
            return await _all([judge(body) for body in bodies])

    async def _score(self, client: aiohttp.ClientSession, body: dict[str, Any]) -> float:
        try:
            reply, score = await self._endpoint.ask(client, body, read_score)
        except RequestRefused as refused:
            if not self._has_answered:
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
            raise ConfigError(f"{refused}; check model, max_tokens and extra_body") from None
        self._has_answered = True


def _text(body: dict[str, Any]) -> str:
    """Equal for equal requests."""
    return json.dumps(body, sort_keys=True)


async def _all(jobs: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """The results, or the first error, after which nothing is left running."""
    tasks = [asyncio.ensure_future(job) for job in jobs]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await end_all(tasks)
