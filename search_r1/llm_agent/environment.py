"""The search environment: answers a policy turn with passages from a retriever, with feedback, or with the end."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from search_r1.llm_agent.grammar import (
    ANSWER_STOP,
    SEARCH_STOP,
    TAGS,
    ObservationWriter,
    has_thought,
    parse_action,
    wrap_feedback,
    wrap_information,
)
from search_r1.search.client import RetrievalClient
from search_r1.search.errors import RetrieverError
from verl.agent.environment import Outcome
from verl.agent.text import encode_text
from verl.errors import ConfigError, EnvironmentUnavailable
from verl.protocol import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from verl.config import Config


class SearchEnvironment:
    """Implements `verl.agent.environment.Environment` with one tool: search. Without a `client` there is no tool.

    Raises `ConfigError` when `max_obs_length` tokens do not hold the feedback or an empty observation, or when the
    feedback has a tag in it (it would read like an action of the policy).
    """

    def __init__(
        self, client: RetrievalClient | None, tokenizer: PreTrainedTokenizerBase, max_obs_length: int, feedback: str
    ) -> None:
        self._client = client
        self._writer = ObservationWriter(tokenizer, max_obs_length)
        self._feedback_ids = encode_text(tokenizer, wrap_feedback(feedback))
        self.stop_strings: tuple[str, ...] = (ANSWER_STOP,) if client is None else (SEARCH_STOP, ANSWER_STOP)
        needed = max(len(self._feedback_ids), len(encode_text(tokenizer, wrap_information(""))))
        if needed > max_obs_length:
            raise ConfigError(
                f"data.max_obs_length={max_obs_length} is too small: the shortest reply has {needed} tokens"
            )
        if any(tag in feedback for tag in TAGS):
            raise ConfigError(f"agent.feedback has a tag in it: {feedback!r}; describe the tags in words")

    @classmethod
    def from_config(cls, config: Config, tokenizer: PreTrainedTokenizerBase) -> SearchEnvironment:
        retriever = config.retriever
        client = None
        if config.do_search:
            client = RetrievalClient(
                retriever.url,
                topk=retriever.topk,
                timeout_s=retriever.timeout_s,
                deadline_s=retriever.deadline_s,
                max_batch=retriever.max_batch,
            )
        return cls(client, tokenizer, config.data.max_obs_length, config.agent.feedback)

    async def step(self, prompt: Prompt, text: str, tools_allowed: bool) -> Outcome:
        """See `verl.agent.environment.Environment`. A search that is not executed counts as valid, without a reply."""
        outcome = await self._reply(text, tools_allowed)
        return replace(outcome, event=outcome.event | {"empty_think": not has_thought(text)})

    async def _reply(self, text: str, tools_allowed: bool) -> Outcome:
        action = parse_action(text)
        if action.kind == "answer":
            return Outcome("answer", valid=True, done=True, event={"answer": action.content})
        if action.kind == "search" and self._client is not None:
            if not tools_allowed:
                return Outcome("search", valid=True, done=False, event={"query": action.content, "executed": False})
            return await self._search(self._client, action.content)
        return Outcome("invalid", valid=False, done=False, ids=self._feedback_ids if tools_allowed else ())

    async def check(self) -> None:
        if self._client is None:
            return
        try:
            await self._client.check()
        except RetrieverError as error:
            raise EnvironmentUnavailable(str(error)) from error

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()

    async def _search(self, client: RetrievalClient, query: str) -> Outcome:
        started = time.perf_counter()
        try:
            documents = await client.search(query)
        except RetrieverError as error:
            raise EnvironmentUnavailable(str(error)) from error
        observation = self._writer.write(documents)
        event: dict[str, Any] = {
            "query": query,
            "executed": True,
            "document_ids": [_id(document) for document in documents[: observation.num_documents]],
            "num_found": len(documents),
            "milliseconds": 1000 * (time.perf_counter() - started),
            "observation": observation.text,
        }
        return Outcome("search", valid=True, done=False, ids=observation.ids, event=event)


def _id(document: dict[str, Any]) -> str:
    """As text; "" when the server sends none (online engines)."""
    return "" if document.get("id") is None else str(document["id"])
