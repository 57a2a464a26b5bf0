"""The methods by name: the agent's settings for each, and its construction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from search_r1.llm_agent.templates import template_of
from verl.config import Config
from verl.errors import ConfigError

if TYPE_CHECKING:
    from search_r1.evaluation.methods.base import Method
    from search_r1.llm_agent.agent import SearchAgent
    from search_r1.llm_agent.search_engine import Searcher


@dataclass(frozen=True)
class MethodTraits:
    """`template` None: that of the agent's settings. `retrieves`: it uses a retriever; `loops`: more than one turn."""

    template: str | None
    retrieves: bool
    loops: bool
    needs_context: bool = False


METHODS = {
    "search": MethodTraits(None, retrieves=True, loops=True),
    "direct": MethodTraits("direct", retrieves=False, loops=False),
    "cot": MethodTraits("r1", retrieves=False, loops=False),
    "rag": MethodTraits("rag", retrieves=True, loops=False, needs_context=True),
    "ircot": MethodTraits("ircot", retrieves=True, loops=True, needs_context=True),
}


def overrides_of(method: str, own_template: bool) -> tuple[str, ...]:
    """Config overrides of a method; with `own_template` the user chose the template."""
    traits, overrides = METHODS[method], []
    if traits.template is not None and not own_template:
        overrides.append(f"agent.template={traits.template}")
    if not traits.loops:
        overrides.append("do_search=false")
    return tuple(overrides)


def check_template(method: str, config: Config) -> None:
    """Raises `ConfigError` for a template that the method cannot fill."""
    template = template_of(config.agent)
    if template.needs_context != METHODS[method].needs_context:
        kind = "with {context}" if METHODS[method].needs_context else "without {context}"
        raise ConfigError(f"--method {method} needs a template {kind}; {template.name} is none")


def make_method(
    method: str, agent: SearchAgent, config: Config, searcher: Searcher | None, own_prompts: bool
) -> Method:
    """`own_prompts`: `search` uses a prompt file's prompts unchanged. `searcher` is for methods with a context."""
    # Here, because they import torch, which the command line need not wait for.
    from search_r1.evaluation.methods.base import Method, Rag
    from search_r1.evaluation.methods.ircot import Ircot
    from search_r1.llm_agent.observations import ObservationWriter, wrap_feedback

    if searcher is None:
        return Method(agent, own_prompts and method == "search")
    writer = ObservationWriter(agent.tokenizer, config.data.max_obs_length, agent.template.grammar)
    if method == "rag":
        return Rag(agent, searcher=searcher, writer=writer)
    return Ircot(agent, searcher=searcher, writer=writer, feedback=wrap_feedback(config.agent.feedback))
