"""The environment of a chat model that searches by tool calls: what is around the run's retriever, and its prompts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Self

from search_r1.llm_agent.environment import SearchEnvironment, prompt_problem
from search_r1.llm_agent.templates import template_of
from search_r1.search.corpus import title_and_text
from search_r1.tools.search import SearchTool
from verl.agent.chat import ChatEnvironment
from verl.agent.environment import PromptProblem
from verl.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from verl.config import Config


class ChatSearchEnvironment(ChatEnvironment):
    """A `ChatEnvironment` whose tools may search by the retriever of the run."""

    answer_tag = "answer"
    """The tag of the template in which the answer stands."""

    @classmethod
    def from_config(cls, config: Config, tokenizer: PreTrainedTokenizerBase) -> Self:
        """See `verl.agent.environment.Environment`. Raises `ConfigError` for a template that asks for tags."""
        template = template_of(config.agent)
        if template.grammar.search is not None:
            raise ConfigError(
                f"agent.format=chat with agent.template={template.name}, which asks for <{template.grammar.search}> "
                "tags: set agent.template=chat, or one of your own with `tags: {search: null}` in its header"
            )
        made = super().from_config(config, tokenizer)
        made.answer_tag = template.grammar.answer
        return made

    def answer_turn(self, answer: str) -> str:
        """See `verl.agent.environment.Environment`."""
        return f"<{self.answer_tag}> {answer} </{self.answer_tag}>"

    @classmethod
    def check_prompt_file(cls, config: Config, metadata: Mapping[str, str], prompt: str) -> PromptProblem | None:
        """See `verl.agent.environment.Environment`. A prompt must not ask for tags of searches, which nobody reads."""
        return prompt_problem(template_of(config.agent), metadata, prompt)

    @classmethod
    def files(cls, config: Config) -> dict[str, str]:
        """See `verl.agent.environment.Environment`."""
        return SearchEnvironment.files(config)

    @classmethod
    async def sources(cls, config: Config) -> dict[str, str]:
        """See `verl.agent.environment.Environment`."""
        return await SearchEnvironment.sources(config)

    async def probe(self, query: str) -> list[str] | None:
        """See `verl.agent.environment.Environment`."""
        for tool in self.tools.tools:
            if isinstance(tool, SearchTool):
                return [title_and_text(document["contents"])[0] for document in await tool.search(query)]
        return None
