"""A search agent for use outside training: a language model in front of its environment, one question after another.

Prompt, stop rules, limits and passage format are the same as in training, from the same code.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from search_r1.llm_agent.model_source import find_model
from search_r1.llm_agent.templates import Template, normalize_question, template_of
from verl.agent.environment import Environment, Sampler, Sampling, make_environment
from verl.agent.episode import EpisodeLimits, run_episode
from verl.agent.messages import Messages, encode_messages, encode_prompt
from verl.config import Config
from verl.errors import ConfigError
from verl.pretrained import load_model_config, load_policy_tokenizer
from verl.process.startup import phase, tell
from verl.protocol import Prompt, Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from verl.rollout.engine import VLLMEngine


_QUESTION, _CONTEXT = "what-the-user-asks?", "what-was-found-before"  # placeholders


@dataclass(frozen=True)
class SearchAgent:
    """Plays episodes. It keeps no state of an episode, so it can play many at once."""

    sampler: Sampler
    environment: Environment
    tokenizer: PreTrainedTokenizerBase
    template: Template
    limits: EpisodeLimits
    sampling: Sampling

    def prompt(
        self,
        question: str,
        context: str | None = None,
        data_source: str = "question",
        row: dict[str, Any] | None = None,
        before: Sequence[Mapping[str, Any]] = (),
    ) -> Prompt:
        """The prompt for a question. `row` is the dataset row for environment and reward; `question` is added to it.

        `before`: the conversation so far, for an environment of chats. The template's system message comes first, and
        is followed by those of the conversation in the same message. All of this is text from outside: it cannot end
        the message that it is in. Raises `DataError` for messages that the chat template cannot write, and
        `ConfigError` for a conversation where the policy reads tags.
        """
        outside = {_QUESTION: normalize_question(question)} | ({} if context is None else {_CONTEXT: context})
        messages = self.template.messages(_QUESTION, None if context is None else _CONTEXT)
        asked = _continued(before, self.template.messages(question, context))
        ids = self.environment.prompt_ids(asked)
        if ids is None and before:
            raise ConfigError("a policy with tags takes a question alone: leave out the messages before it")
        ids = ids or tuple(encode_prompt(self.tokenizer, messages, outside))
        return Prompt(tuple(ids), data_source, {**(row or {}), "question": question}, messages=asked)

    async def play(self, prompt: Prompt, seed: int | None = None, group_id: str = "question") -> Trajectory:
        """Play one episode to its end. A failed search makes it FAILED; errors of the sampler propagate."""
        return await run_episode(
            prompt, group_id, self.sampler, self.environment, self.tokenizer, self.sampling, self.limits, seed
        )


def _continued(before: Sequence[Mapping[str, Any]], asked: list[dict[str, str]]) -> list[dict[str, Any]]:
    """The messages of a conversation that goes on with those of a question, with one system message at most."""
    together = [*asked[:-1], *before]
    rules = [message["content"] for message in together if message["role"] == "system" and message["content"]]
    others = [dict(message) for message in together if message["role"] != "system"]
    return [*([{"role": "system", "content": "\n\n".join(rules)}] if rules else []), *others, asked[-1]]


@asynccontextmanager
async def open_agent(
    config: Config, sampling: Sampling, own_prompts: Sequence[Messages] = ()
) -> AsyncIterator[SearchAgent]:
    """The agent that `config` describes, with its model in a vLLM engine of this process; closed on exit.

    Logs what it waits for. `own_prompts` are the messages that it is asked with instead of those of its template.
    Raises `ConfigError` without a model, and before the model is loaded `DataError` if its chat template refuses the
    prompts, and `EnvironmentUnavailable` if no retriever answers.
    """
    # What may be wrong is found out before the model is loaded, which takes longest.
    template = template_of(config.agent)
    config = with_model_found(config)
    with phase(f"reading the tokenizer of {config.actor_rollout_ref.model.path}"):
        tokenizer, window = load_tokenizer(config)
    check_prompts(tokenizer, template, own_prompts)
    limits = limits_within(config, window)
    environment = make_environment(config, tokenizer)
    try:
        with phase("checking that the environment answers"):
            await environment.check()
        engine = await start_engine(config, limits)
        try:
            yield SearchAgent(engine, environment, tokenizer, template, limits, sampling)
        finally:
            engine.shutdown()
    finally:
        await environment.close()


def check_prompts(tokenizer: PreTrainedTokenizerBase, template: Template, own: Sequence[Messages] = ()) -> None:
    """Raise `DataError` if the tokenizer's chat template cannot write the prompts `own`, or without them a prompt of
    `template`. Of prompts with the same roles, one is tried."""
    trial = template.messages(_QUESTION, _CONTEXT if template.needs_context else None)
    kinds = {tuple(message["role"] for message in messages if message["content"]): messages for messages in own}
    for messages in kinds.values() if kinds else [trial]:
        encode_messages(tokenizer, messages)


async def start_engine(config: Config, limits: EpisodeLimits) -> VLLMEngine:
    """Start a vLLM engine with the model, for sequences within `limits`."""
    from verl.engine.device.runtime import resolve_device

    # Import first: it takes seconds, and the log says so.
    device = resolve_device(config.trainer.device).type
    with phase("importing vLLM"):
        import verl.rollout.engine  # noqa: F401  it takes seconds
        from verl.rollout.worker import build_engine
    # An engine that does not start is shut down: it may hold memory and processes.
    started = time.monotonic()
    with phase(f"loading the model {config.actor_rollout_ref.model.path}"):
        engine = build_engine(config, limits.window, device)
        try:
            await engine.start()
        except BaseException:
            engine.shutdown()
            raise
    tell(f"the engine is ready, after {time.monotonic() - started:.0f} s")
    return engine


def with_model_found(config: Config) -> Config:
    """A copy whose model is an existing folder, or a name known to the hub. Raises `ConfigError`."""
    config = deepcopy(config)
    config.actor_rollout_ref.model.path = find_model(config.actor_rollout_ref.model.path)
    return config


def load_tokenizer(config: Config) -> tuple[PreTrainedTokenizerBase, int | None]:
    """The tokenizer, and the model's context length if it states one. Raises `ConfigError` without a model."""
    model = config.actor_rollout_ref.model
    try:
        text = load_model_config(model.path, model.trust_remote_code).get_text_config()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{model.path}: no model could be loaded from it: {error}") from error
    return load_policy_tokenizer(config), getattr(text, "max_position_embeddings", None)


def limits_within(config: Config, window: int | None) -> EpisodeLimits:
    """The limits of training, reduced to the model's `window`."""
    limits = EpisodeLimits.from_config(config)
    return limits if window is None else replace(limits, max_model_length=min(limits.window, window))
