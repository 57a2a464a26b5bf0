"""Retrieval interleaved with a chain of thought, in the manner of IRCoT (Trivedi et al. 2023).

The prompt contains passages for the question. Each thought is then the query for the next passages, until the model
answers or its steps are used up; after that, it is not interrupted before its answer.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

from search_r1.evaluation.methods.base import Rag
from search_r1.llm_agent.agent import SearchAgent
from search_r1.llm_agent.grammar import Grammar
from search_r1.llm_agent.observations import ObservationWriter
from search_r1.llm_agent.search_engine import Searcher
from verl.agent.environment import Environment, Outcome
from verl.protocol import Prompt


class ThoughtSearch(Environment):
    """The environment of one episode: it counts the remaining steps.

    A turn with an answer ends the episode; otherwise its last thought is the query. A turn with neither gets
    `feedback`, which costs a step as well.
    """

    def __init__(
        self, searcher: Searcher, writer: ObservationWriter, grammar: Grammar, feedback: str, steps: int
    ) -> None:
        self._searcher, self._writer, self._grammar = searcher, writer, grammar
        self._feedback, self._steps_left = feedback, steps
        self.tags = grammar.tags
        self.stop_strings = self._stops()

    async def step(self, prompt: Prompt, text: str, tools_allowed: bool) -> Outcome:
        self._steps_left = max(0, self._steps_left - 1)
        self.stop_strings = self._stops()
        answer = self._grammar.extract_answer(text)
        if answer is not None:
            return Outcome("answer", valid=True, done=True, event={"answer": answer})
        query = next((thought for thought in reversed(self._grammar.thoughts(text)) if thought), None)
        if query is None:
            return Outcome("invalid", valid=False, done=False, reply=self._feedback if tools_allowed else "")
        if not tools_allowed:
            return Outcome("search", valid=True, done=False, event={"query": query, "executed": False})
        return await self._look_up(query)

    async def check(self) -> None:
        await self._searcher.check()

    async def close(self) -> None:
        await self._searcher.close()

    def _stops(self) -> tuple[str, ...]:
        answer = f"</{self._grammar.answer}>"
        return (f"</{self._grammar.think}>", answer) if self._steps_left else (answer,)

    async def _look_up(self, query: str) -> Outcome:
        started = time.perf_counter()
        documents = await self._searcher.search(query)
        observation = self._writer.write(documents)
        shown = documents[: observation.num_documents]
        event: dict[str, Any] = {
            "query": query,
            "executed": True,
            "document_ids": ["" if document.get("id") is None else str(document["id"]) for document in shown],
            "num_found": len(documents),
            "milliseconds": 1000 * (time.perf_counter() - started),
            "observation": observation.text,
        }
        return Outcome("search", valid=True, done=False, reply=observation.text, event=event)


@dataclass(frozen=True, kw_only=True)
class Ircot(Rag):
    """`limits.max_turns` of the agent is the number of steps."""

    feedback: str

    def agent_of(self, prompt: Prompt) -> SearchAgent:
        agent = self.agent
        environment = ThoughtSearch(
            self.searcher, self.writer, agent.template.grammar, self.feedback, agent.limits.max_turns
        )
        return replace(agent, environment=environment)
