"""Methods of answering a question, compared under the same conditions: the search agent and its baselines, by name.

A method is an agent with its prompt: from a question to a finished trajectory. `Ircot` interleaves retrieval with a
chain of thought, in the manner of IRCoT (Trivedi et al. 2023): the prompt contains passages for the question, and each
thought is then the query for the next passages, until the model answers or its steps are used up; after that, it is not
interrupted before its answer.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from search_r1.evaluation.questions import Question
from search_r1.llm_agent.grammar import Grammar
from verl.agent.environment import Environment, Outcome
from verl.agent.messages import encode_messages
from verl.config import Config
from verl.errors import DataError, EnvironmentUnavailable
from verl.protocol import Prompt, Segment, Source, Status, Trajectory

if TYPE_CHECKING:  # they import torch and aiohttp, which the command line need not wait for
    from search_r1.llm_agent.agent import SearchAgent
    from search_r1.llm_agent.observations import ObservationWriter
    from search_r1.llm_agent.search_engine import Searcher

CONTEXT = "context"
"""In a prompt's row: the passages that were looked up before the model was asked."""


def make_method(
    method: str, agent: SearchAgent, config: Config, searcher: Searcher | None, own_prompts: bool
) -> Method:
    """`own_prompts`: `search` uses a prompt file's prompts unchanged. `searcher` is for methods with a context."""
    # Here, because they import torch, which the command line need not wait for.
    from search_r1.llm_agent.observations import ObservationWriter, wrap_feedback

    if searcher is None:
        return Method(agent, own_prompts and method == "search")
    writer = ObservationWriter(agent.tokenizer, config.data.max_obs_length, agent.template.grammar)
    if method == "rag":
        return Rag(agent, searcher=searcher, writer=writer)
    return Ircot(agent, searcher=searcher, writer=writer, feedback=wrap_feedback(config.agent.feedback))


@dataclass(frozen=True)
class Method:
    """One turn or a search loop, depending on the agent's environment and limits: `search`, `direct` and `cot`.

    With `own_prompts`, the prompt of a prompt file's row is used unchanged.
    """

    agent: SearchAgent
    own_prompts: bool = False

    async def play(self, question: Question, seed: int | None = None) -> Trajectory:
        """Play one episode. It is FAILED if a retriever was not available; errors of the sampler propagate."""
        try:
            prompt = await self.prompt(question)
        except EnvironmentUnavailable as error:
            not_asked = Prompt((), question.set_name, row_of(question))
            segments = [Segment(Source.PROMPT, ())]
            return Trajectory(question.key, not_asked, segments, status=Status.FAILED, failure=str(error))
        return await self.agent_of(prompt).play(prompt, seed, question.key)

    async def prompt(self, question: Question) -> Prompt:
        if self.own_prompts and question.messages is not None:
            environment, messages = self.agent.environment, question.messages
            ids = environment.prompt_ids(messages) or encode_messages(self.agent.tokenizer, messages, environment.tags)
            return Prompt(tuple(ids), question.set_name, row_of(question), messages=messages)
        return self.agent.prompt(text_of(question), data_source=question.set_name, row=row_of(question))

    def agent_of(self, prompt: Prompt) -> SearchAgent:
        """The agent that plays this prompt's episode."""
        return self.agent


def row_of(question: Question) -> dict[str, Any]:
    """The dataset row for the reward and the trajectory store."""
    row: dict[str, Any] = {"reward_model": {"ground_truth": {"target": list(question.golden_answers)}}}
    if question.text is not None:
        row["question"] = question.text
    if question.messages is not None:
        row["prompt"] = question.messages
    if question.evidence:
        row["evidence"] = list(question.evidence)
    return row


def text_of(question: Question) -> str:
    """The question's text. Raises `DataError` for a prompt file's row that does not have it."""
    if question.text is None:
        raise DataError(
            f"{question.key}: its row has a prompt but no 'question', which every method but search with the row's own "
            f"prompt needs; give the set as JSON lines"
        )
    return question.text


# Single-shot RAG: the prompt contains the passages found for the question.


@dataclass(frozen=True, kw_only=True)
class Rag(Method):
    """The passages are formatted, cleaned and truncated as in an observation of the search agent."""

    searcher: Searcher
    writer: ObservationWriter

    async def prompt(self, question: Question) -> Prompt:
        text = text_of(question)
        observation = self.writer.write(await self.searcher.search(text))
        context = self.agent.template.grammar.unwrap_information(observation.text)
        row = row_of(question) | {CONTEXT: context}
        return self.agent.prompt(text, context, question.set_name, row)


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
        # The observation has a limit of tokens: the last documents may have no place in it.
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
