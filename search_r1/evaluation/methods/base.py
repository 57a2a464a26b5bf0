"""A method is an agent with its prompt: from a question to a finished trajectory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from search_r1.evaluation.questions import Question
from search_r1.llm_agent.agent import SearchAgent
from verl.data.prompts import encode_prompt
from verl.errors import DataError, EnvironmentUnavailable
from verl.protocol import Prompt, Segment, Source, Status, Trajectory

if TYPE_CHECKING:
    from search_r1.llm_agent.observations import ObservationWriter
    from search_r1.llm_agent.search_engine import Searcher

CONTEXT = "context"
"""In a prompt's row: the passages that were looked up before the model was asked."""


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
            ids = encode_prompt(self.agent.tokenizer, question.messages)
            return Prompt(tuple(ids), question.set_name, row_of(question))
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
