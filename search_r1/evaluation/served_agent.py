"""The search agent with its model behind an OpenAI-compatible server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from search_r1.evaluation.openai_sampler import OpenAISampler
from search_r1.llm_agent.agent import SearchAgent, limits_within
from search_r1.llm_agent.model_source import find_source
from search_r1.llm_agent.templates import template_of
from verl.agent.environment import Sampling, make_environment
from verl.config import Config
from verl.pretrained import load_tokenizer
from verl.process.secrets import mask_text
from verl.process.startup import phase


@dataclass(frozen=True)
class Server:
    """`model` is the name under which `url` serves it; `tokenizer` the folder or hub name of its tokenizer."""

    url: str
    model: str
    tokenizer: str
    deadline_s: float = 600.0
    concurrency: int = 64


@asynccontextmanager
async def open_served_agent(config: Config, sampling: Sampling, server: Server) -> AsyncIterator[SearchAgent]:
    """Like `search_r1.llm_agent.agent.open_agent`; no sequence is longer than the server accepts.

    Raises `ConfigError` without a tokenizer, `RolloutError` if the server is down or lacks the model, and
    `EnvironmentUnavailable` if no retriever answers.
    """
    template = template_of(config.agent)
    tokenizer = load_tokenizer(
        find_source(server.tokenizer, "--tokenizer"), config.actor_rollout_ref.model.trust_remote_code, "--tokenizer"
    )
    environment = make_environment(config, tokenizer)
    sampler = OpenAISampler(server.url, server.model, tokenizer, server.deadline_s, server.concurrency)
    try:
        await environment.check()
        with phase(f"asking for the model {server.model} at {mask_text(server.url)}"):
            window = await sampler.check()
        limits = limits_within(config, window)
        yield SearchAgent(sampler, environment, tokenizer, template, limits, sampling)
    finally:
        await sampler.close()
        await environment.close()
