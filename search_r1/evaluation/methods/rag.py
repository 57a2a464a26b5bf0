"""Single-shot RAG: the prompt contains the passages found for the question."""

from __future__ import annotations

from dataclasses import dataclass

from search_r1.evaluation.methods.base import CONTEXT, Method, row_of, text_of
from search_r1.evaluation.questions import Question
from search_r1.llm_agent.observations import ObservationWriter
from search_r1.llm_agent.search_engine import Searcher
from verl.protocol import Prompt


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
