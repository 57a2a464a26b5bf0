"""The search environment: answers a policy turn with retrieved passages, with feedback, or by ending the episode."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from search_r1.http.address import addresses_of
from search_r1.llm_agent.grammar import SEARCH_R1, Grammar
from search_r1.llm_agent.observations import ObservationWriter, wrap_feedback
from search_r1.llm_agent.prompt_check import prompt_problem
from search_r1.llm_agent.search_engine import Searcher, index_named, retriever_info
from search_r1.llm_agent.templates import TEMPLATE_FILE, template_of
from search_r1.search.corpus import title_and_text
from search_r1.search.sanitize import whole_characters
from verl.agent.environment import Environment, Outcome, PromptProblem
from verl.agent.text import encode_text
from verl.errors import ConfigError
from verl.protocol import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from verl.config import Config


class SearchEnvironment(Environment):
    """An environment with one tool, search; without a `searcher` it has none.

    Raises `ConfigError` if the feedback or an empty observation is longer than `max_obs_length` tokens, or if the
    feedback contains a tag (it would look like an action of the policy).
    """

    def __init__(
        self,
        searcher: Searcher | None,
        tokenizer: PreTrainedTokenizerBase,
        max_obs_length: int,
        feedback: str,
        grammar: Grammar = SEARCH_R1,
    ) -> None:
        self.grammar = grammar
        self.tags = grammar.tags
        self.example_turn = grammar.example_answer()
        self._searcher = searcher if grammar.search is not None else None
        self._writer = ObservationWriter(tokenizer, max_obs_length, grammar)
        self._feedback = wrap_feedback(feedback)
        self.stop_strings = grammar.stop_strings(search_allowed=self._searcher is not None)
        needed = max(len(encode_text(tokenizer, text)) for text in (self._feedback, grammar.wrap_information("")))
        if needed > max_obs_length:
            raise ConfigError(
                f"data.max_obs_length={max_obs_length} is too small: the shortest reply has {needed} tokens"
            )
        if any(tag in feedback for tag in grammar.tags):
            raise ConfigError(f"agent.feedback has a tag in it: {feedback!r}; describe the tags in words")

    @classmethod
    def from_config(cls, config: Config, tokenizer: PreTrainedTokenizerBase) -> SearchEnvironment:
        grammar = template_of(config.agent).grammar
        searcher = Searcher.from_config(config.retriever) if config.do_search and grammar.search is not None else None
        return cls(searcher, tokenizer, config.data.max_obs_length, config.agent.feedback, grammar)

    async def step(self, prompt: Prompt, text: str, tools_allowed: bool) -> Outcome:
        """See `verl.agent.environment.Environment`. A search that is not executed counts as valid and gets no reply."""
        outcome = await self._reply(text, tools_allowed)
        return replace(outcome, event=outcome.event | {"empty_think": not self.grammar.has_thought(text)})

    async def _reply(self, text: str, tools_allowed: bool) -> Outcome:
        action = self.grammar.parse_action(text)
        if action.kind == "answer":
            answer = self.grammar.extract_answer(text)
            return Outcome(
                "answer", valid=True, done=True, event={"answer": action.content if answer is None else answer}
            )
        if action.kind == "search" and self._searcher is not None:
            if not tools_allowed:
                return Outcome("search", valid=True, done=False, event={"query": action.content, "executed": False})
            return await self._search(self._searcher, action.content)
        return Outcome("invalid", valid=False, done=False, reply=self._feedback if tools_allowed else "")

    async def check(self) -> None:
        if self._searcher is not None:
            await self._searcher.check()

    @classmethod
    def check_prompt_file(cls, config: Config, metadata: Mapping[str, str], prompt: str) -> PromptProblem | None:
        """See `verl.agent.environment.Environment`."""
        return prompt_problem(template_of(config.agent), metadata, prompt)

    @classmethod
    def files(cls, config: Config) -> dict[str, str]:
        """See `verl.agent.environment.Environment`."""
        return {TEMPLATE_FILE: template_of(config.agent).source}

    @classmethod
    async def sources(cls, config: Config) -> dict[str, str]:
        """See `verl.agent.environment.Environment`."""
        found = {"the template": template_of(config.agent).fingerprint}
        retriever = config.retriever
        if config.do_search and retriever.engine is None and retriever.placement == "apart":
            infos = await asyncio.gather(*map(retriever_info, addresses_of(retriever.url)))
            if index := next(filter(None, map(index_named, infos)), None):
                found["the retriever's index"] = index
        return found

    async def probe(self, query: str) -> list[str] | None:
        """See `verl.agent.environment.Environment`."""
        if self._searcher is None:
            return None
        return [title_and_text(document["contents"])[0] for document in await self._searcher.search(query)]

    async def close(self) -> None:
        if self._searcher is not None:
            await self._searcher.close()

    async def _search(self, searcher: Searcher, query: str) -> Outcome:
        started = time.perf_counter()
        documents = await searcher.search(query)
        observation = self._writer.write(documents)
        shown = documents[: observation.num_documents]
        ids = (document.get("id") for document in shown)  # None from an online engine
        event: dict[str, Any] = {
            "query": query,
            "executed": True,
            "document_ids": ["" if name is None else whole_characters(str(name)) for name in ids],
            "scores": [_score(document) for document in shown],
            "num_found": len(documents),
            "milliseconds": 1000 * (time.perf_counter() - started),
            "observation": observation.text,
        }
        return Outcome("search", valid=True, done=False, reply=observation.text, event=event)


def _score(document: Any) -> float | None:
    """The score that the server sent with `document`; None if it sent none, or something that is not a number."""
    score = document.get("score")
    return float(score) if isinstance(score, int | float) and not isinstance(score, bool) else None
