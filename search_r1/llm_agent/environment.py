"""The search environment: answers a policy turn with retrieved passages, with feedback, or by ending the episode."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from search_r1.http.client import addresses_of
from search_r1.llm_agent.grammar import SEARCH_R1, Grammar
from search_r1.llm_agent.observations import ObservationWriter, wrap_feedback
from search_r1.llm_agent.run_retriever import launch_text
from search_r1.llm_agent.search_engine import Searcher, index_named, retriever_info
from search_r1.llm_agent.templates import (
    FINGERPRINT_KEY,
    TEMPLATE_FILE,
    TEMPLATE_KEY,
    Template,
    load_template,
    shipped_templates,
    template_of,
)
from search_r1.search.corpus import title_and_text
from search_r1.search.sanitize import whole_characters
from verl.agent.environment import Environment, Outcome, PromptProblem
from verl.agent.text import encode_text
from verl.agent.tools.loading import uses_retriever
from verl.errors import ConfigError
from verl.protocol import Prompt
from verl.run.run_folder import RETRIEVER_FILE

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from verl.config import Config

_TAG = re.compile(r"</?([A-Za-z][A-Za-z0-9_-]*)>")


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
        # Without a search tag in its grammar, the policy could never ask.
        self._searcher = searcher if grammar.search is not None else None
        self._writer = ObservationWriter(tokenizer, max_obs_length, grammar)
        self._feedback = wrap_feedback(feedback)
        self.stop_strings = grammar.stop_strings(search_allowed=self._searcher is not None)
        # Neither can be cut: the feedback, and the tags around an empty observation.
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

    def answer_turn(self, answer: str) -> str:
        """See `verl.agent.environment.Environment`."""
        return self.grammar.example_answer("I know it.", answer)

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
        files = {TEMPLATE_FILE: template_of(config.agent).source}
        if uses_retriever(config) and config.retriever.engine is None and (launch := launch_text(config.retriever)):
            files[RETRIEVER_FILE] = launch
        return files

    @classmethod
    async def sources(cls, config: Config) -> dict[str, str]:
        """See `verl.agent.environment.Environment`."""
        found = {"the template": template_of(config.agent).fingerprint}
        retriever = config.retriever
        if uses_retriever(config) and retriever.engine is None and retriever.placement == "apart":
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
        # What is stored are the documents that the policy reads: others did not fit into the observation.
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


# Check that a prompt file tells the policy to use the tags that the run's template parses. A file made by this project
# names its template in the footer. In any other file, the prompt's text shows it: it names the tags that the policy
# should write.


def prompt_problem(template: Template, metadata: Mapping[str, str], prompt: str) -> PromptProblem | None:
    """`template` is the run's; `metadata` is the file's, and `prompt` is the text of its first prompt.

    It is a contradiction if the prompt names some tags but not the template's search or answer tags, or a tag that only
    another shipped template has. Other wording with the same tags is not.
    """
    # Which tags the prompt names, and who else has them.
    in_prompt, in_template = _names(prompt), _names(template.text)
    known = in_template | set(template.grammar.names)
    of_shipped = {name: _names(load_template(name).text) for name in shipped_templates()}
    foreign = in_prompt - known
    source = metadata.get(TEMPLATE_KEY) or next((name for name, tags in of_shipped.items() if tags == in_prompt), None)
    its_own = f"agent.template={template.name} reads {_shown(known)}"
    # A prompt without any tag says nothing; with tags that disagree it is a contradiction, or at least suspicious.
    if not in_prompt & (known | set().union(*of_shipped.values())):
        return PromptProblem(f"the prompt names none of the tags; {its_own}", False) if in_template else None
    difference = f"the prompt names {_shown(in_prompt)}{f' as template {source}' if source else ''}, but {its_own}"
    missing = in_template - in_prompt
    if missing & {template.grammar.search, template.grammar.answer} or foreign & set().union(*of_shipped.values()):
        return PromptProblem(difference, True)
    if missing and foreign:
        return PromptProblem(difference, False)
    # The tags agree: what is left is a file that names a template with other words.
    made_with = metadata.get(FINGERPRINT_KEY)
    if made_with in (None, template.fingerprint):
        return None
    words = f"made with template {source} ({made_with}), but agent.template={template.name} ({template.fingerprint})"
    return PromptProblem(f"{words}: other words, the same tags", False)


def _names(text: str) -> set[str]:
    return set(_TAG.findall(text))


def _shown(names: Iterable[str]) -> str:
    return ", ".join(f"<{name}>" for name in sorted(names))
