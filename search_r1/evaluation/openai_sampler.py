"""A language model behind an OpenAI-compatible server (vLLM, SGLang): as the sampler of an episode, and as an agent.

`POST {url}/completions` with token ids as the prompt, so that the context is exactly that of training. A server that
returns token ids (vLLM) reports exactly what it sampled. Others return only text: it is tokenised here, possibly into
other tokens than were sampled, and log-probs are NaN. A special token within such a text may be sampled, or copied from
a page character by character: it is taken as text, and only the end of a turn is a special token. The calls of a chat
model (`agent.format=chat`) are read from ids, so it needs a server that returns them.

Why not the `openai` client: for 64 concurrent requests of 1,000 ids it takes 10.3 ms of CPU each, aiohttp 0.27 ms.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import aiohttp

from search_r1.http.client import backoff_s, is_http_address, is_temporary
from search_r1.llm_agent.agent import SearchAgent, check_prompts, limits_within
from search_r1.llm_agent.model_source import find_source
from search_r1.llm_agent.observations import special_tokens
from search_r1.llm_agent.templates import template_of
from url_text import mask_text, refused_address, without_credentials
from verl.agent.environment import Generation, Sampling, make_environment
from verl.agent.messages import Messages
from verl.agent.text import added_tokens, encode_outside
from verl.config import Config
from verl.errors import ConfigError, RolloutError
from verl.pretrained import load_tokenizer
from verl.process.startup import phase

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 10.0
_CHECK_DEADLINE_S = 10.0
_KEY_VARIABLE = "OPENAI_API_KEY"
_START = "start one with: python -m vllm.entrypoints.openai.api_server --model DIR"

# Not part of the OpenAI protocol. The neutral values keep out what a model's generation_config.json would put in.
_EXTENSIONS = {
    "include_stop_str_in_output": True,  # vLLM
    "no_stop_trim": True,  # SGLang
    "return_token_ids": True,
    "skip_special_tokens": False,
    "repetition_penalty": 1.0,
    "min_p": 0.0,
}
_NEEDS_IDS = (
    "agent.format=chat needs the token ids that were sampled, to read tool calls: use a server that returns them"
)
_CLOSING = re.compile(r"</([^<>/]+)>")


class _Passing(Exception):
    """An attempt failed in a way that may pass."""


class OpenAISampler:
    """Implements `verl.agent.environment.Sampler`; use it from one event loop and `close` it.

    `deadline_s` bounds all attempts of one turn; at most `concurrency` requests run at once. If OPENAI_API_KEY is set
    in the environment, it is sent as a bearer token. `is_exact` says whether the ids so far were the server's own.
    `tags` are those of the agent's environment, which may be special tokens of the tokenizer.
    """

    def __init__(
        self,
        url: str,
        model: str,
        tokenizer: PreTrainedTokenizerBase,
        deadline_s: float = 600.0,
        concurrency: int = 64,
        tags: tuple[str, ...] = (),
    ) -> None:
        url = url.rstrip("/")
        if not is_http_address(url):
            raise ConfigError(f"{refused_address(url)!r} is not the address of a server: write http://host:port/v1")
        self.url = url if urlsplit(url).path else f"{url}/v1"  # without a path it is the same server
        self.model, self.is_exact = model, True
        self._name = without_credentials(self.url)  # for messages
        self._tokenizer, self._deadline_s, self._tags = tokenizer, deadline_s, tags
        self._places = asyncio.Semaphore(concurrency)
        self._extensions: dict[str, Any] = dict(_EXTENSIONS)
        self._session: aiohttp.ClientSession | None = None

    async def check(self) -> int | None:
        """The longest sequence that the server accepts, if it says so. Raises `RolloutError` if it lacks the model."""
        reply = await self._request("GET", "/models", None, min(_CHECK_DEADLINE_S, self._deadline_s))
        models = {entry["id"]: entry for entry in reply.get("data", []) if isinstance(entry, dict) and "id" in entry}
        if self.model not in models:
            served = ", ".join(models) or "none"
            raise RolloutError(f"{self._name} serves no model {self.model!r}; set --served_model to one of: {served}")
        longest = models[self.model].get("max_model_len")
        return longest if isinstance(longest, int) else None

    async def generate(self, ids: Sequence[int], sampling: Sampling) -> Generation:
        """Continue `ids`. Raises `RolloutError` if the server is down or refuses, or the reply is invalid."""
        async with self._places:
            reply = await self._request("POST", "/completions", self._body(ids, sampling), self._deadline_s)
        try:
            generation, exact = generation_of(reply, sampling.stop, self._tokenizer, self._tags)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise RolloutError(f"{self._name}: the answer is no completion: {error!r}: {str(reply)[:300]}") from error
        if sampling.stop_token_ids and not exact:
            raise RolloutError(f"{self._name} gave text without token ids; {_NEEDS_IDS} (vLLM, by return_token_ids)")
        self.is_exact &= exact
        return generation

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def _body(self, ids: Sequence[int], sampling: Sampling) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": list(ids),
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "stop": list(sampling.stop),
            "logprobs": 1,
        }
        if sampling.seed is not None:
            body["seed"] = sampling.seed
        if sampling.stop_token_ids:
            body["stop_token_ids"] = list(sampling.stop_token_ids)
        # `top_k` is no option of OpenAI either: it goes with the extensions once a server has refused one.
        return body | ({"top_k": sampling.top_k} if self._extensions else {}) | self._extensions

    async def _request(self, method: str, path: str, body: dict[str, Any] | None, deadline_s: float) -> dict[str, Any]:
        """Attempt until it works or the deadline would pass."""
        start, attempts = time.monotonic(), 0
        while True:
            left_s = max(deadline_s - (time.monotonic() - start), 0.001)  # 0 would be no bound at all
            attempts += 1
            try:
                return await self._attempt(method, path, body, left_s)
            except _Passing as trouble:
                pause_s = backoff_s(attempts, _FIRST_PAUSE_S, _LONGEST_PAUSE_S)
                if time.monotonic() - start + pause_s >= deadline_s:
                    elapsed = f"{attempts} attempts in {time.monotonic() - start:.1f} s"
                    raise RolloutError(
                        f"the model server {self._name} is not available ({elapsed}; last: {trouble}); {_START}"
                    ) from trouble
            await asyncio.sleep(pause_s)

    async def _attempt(self, method: str, path: str, body: dict[str, Any] | None, timeout_s: float) -> dict[str, Any]:
        try:
            async with self._open_session().request(
                method, self.url + path, json=body, timeout=aiohttp.ClientTimeout(total=timeout_s)
            ) as response:
                text = await response.text(errors="replace")
                status = response.status
        except aiohttp.InvalidURL as error:
            raise RolloutError(f"--server {self._name} is not an http:// or https:// URL") from error
        except (aiohttp.ClientError, TimeoutError) as error:
            raise _Passing(without_credentials(f"{type(error).__name__}: {error}")) from error
        # Trouble that may pass is for the caller to try again; a refusal is final, unless an extension is the reason.
        if is_temporary(status):
            raise _Passing(f"HTTP {status}: {text[:300]}")
        if status != 200:
            return await self._refused(method, path, body, timeout_s, f"HTTP {status}: {text[:500]}", status)
        return _object(text, self._name)

    async def _refused(
        self, method: str, path: str, body: dict[str, Any] | None, timeout_s: float, reason: str, status: int
    ) -> dict[str, Any]:
        """Attempt once more, in plain OpenAI, if the server's error names one of the extensions; else raise."""
        unknown = [name for name in (*_EXTENSIONS, "top_k") if body is not None and name in body and name in reason]
        if status not in (400, 422) or not unknown:
            hint = {401: f"; set {_KEY_VARIABLE}", 404: "; check --server and --served_model"}.get(status, "")
            if body is not None and "stop_token_ids" in body and "stop_token_ids" in reason:
                hint = f"; {_NEEDS_IDS}, and takes stop_token_ids (vLLM)"
            raise RolloutError(f"the model server {self._name} refused the request: {reason}{hint}")
        if body is not None and "stop_token_ids" in body:
            raise RolloutError(f"the model server {self._name} refused {', '.join(unknown)}; {_NEEDS_IDS} (vLLM)")
        self._extensions = {}
        plain = {name: value for name, value in (body or {}).items() if name not in (*_EXTENSIONS, "top_k")}
        return await self._attempt(method, path, plain, timeout_s)

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            key = os.environ.get(_KEY_VARIABLE, "").strip()
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            self._session = aiohttp.ClientSession(headers=headers, connector=aiohttp.TCPConnector(limit=0))
        return self._session


def _object(text: str, url: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RolloutError(f"{url}: the answer is no JSON: {text[:300]!r}; is it an OpenAI server?") from error
    if not isinstance(value, dict):
        raise RolloutError(f"{url}: the answer is no JSON object: {text[:300]!r}")
    return value


# Turn the reply of a completions server into a sampled turn.


def generation_of(
    reply: dict[str, Any], stop: Sequence[str], tokenizer: PreTrainedTokenizerBase, tags: tuple[str, ...] = ()
) -> tuple[Generation, bool]:
    """(turn, whether its ids are exactly the sampled ones). Raises KeyError, IndexError, TypeError or ValueError."""
    choice = reply["choices"][0]
    finish, text = choice["finish_reason"], choice["text"]
    if finish not in ("stop", "length") or not isinstance(text, str):
        raise ValueError(f"finish_reason is {finish!r}, text is a {type(text).__name__}")
    ids = choice.get("token_ids")
    if ids is not None:
        return Generation(tuple(map(int, ids)), _log_probs(choice, len(ids)), finish), True
    # Without ids they are made from the text, to which a stop string belongs that the server removed.
    if finish == "stop":
        text += missing_stop(text, stop, choice)
    # A turn that the model ended by itself has its end token as last id, whether or not the text shows it.
    ends_itself = finish == "stop" and not text.endswith(tuple(stop))
    end = next((token for token in special_tokens(tokenizer) if ends_itself and text.endswith(token)), None)
    # Added tokens that are not special are tokens wherever they stand; a special one within the text is read as text.
    ordinary = {literal for literal in added_tokens(tokenizer).values() if literal not in special_tokens(tokenizer)}
    ids = encode_outside(tokenizer, text if end is None else text.removesuffix(end), (*tags, *stop, *sorted(ordinary)))
    if end is not None:
        ids += (tokenizer.convert_tokens_to_ids(end),)
    elif ends_itself and tokenizer.eos_token_id is not None:
        ids += (tokenizer.eos_token_id,)
    return Generation(ids, (math.nan,) * len(ids), finish), False


def missing_stop(text: str, stop: Sequence[str], choice: dict[str, Any]) -> str:
    """The stop string that ended `text` and that the server removed; "" if it is there, or if the model ended the turn.

    A server's own statement is used if there is one (`stop_reason` of vLLM, `matched_stop` of SGLang). Otherwise a
    closing tag counts as removed if its opening tag is still open; of several, the one opened last.
    """
    if text.endswith(tuple(stop)):
        return ""
    for name in ("stop_reason", "matched_stop"):
        if name in choice:  # null or a token's id: the model ended the turn
            return choice[name] if choice[name] in stop else ""
    opened = {text.rfind(f"<{match[1]}>"): closing for closing in stop if (match := _CLOSING.fullmatch(closing))}
    last = max((start for start, closing in opened.items() if start >= 0 and closing not in text[start:]), default=-1)
    return opened.get(last, "") if last >= 0 else ""


def _log_probs(choice: dict[str, Any], count: int) -> tuple[float, ...]:
    """NaN for each token where the server gives none."""
    values = (choice.get("logprobs") or {}).get("token_logprobs")
    if not isinstance(values, list) or len(values) != count or None in values:
        return (math.nan,) * count
    return tuple(map(float, values))


# The search agent with its model behind an OpenAI-compatible server.


@dataclass(frozen=True)
class Server:
    """`model` is the name under which `url` serves it; `tokenizer` the folder or hub name of its tokenizer."""

    url: str
    model: str
    tokenizer: str
    deadline_s: float = 600.0
    concurrency: int = 64


@asynccontextmanager
async def open_served_agent(
    config: Config, sampling: Sampling, server: Server, own_prompts: Sequence[Messages] = ()
) -> AsyncIterator[SearchAgent]:
    """Like `search_r1.llm_agent.agent.open_agent`; no sequence is longer than the server accepts.

    Raises `ConfigError` without a tokenizer, `DataError` if its chat template refuses the prompts, `RolloutError` if
    the server is down or lacks the model, and `EnvironmentUnavailable` if no retriever answers.
    """
    template = template_of(config.agent)
    tokenizer = load_tokenizer(
        find_source(server.tokenizer, "--tokenizer"), config.actor_rollout_ref.model.trust_remote_code, "--tokenizer"
    )
    check_prompts(tokenizer, template, own_prompts)
    environment = make_environment(config, tokenizer)
    sampler = OpenAISampler(
        server.url, server.model, tokenizer, server.deadline_s, server.concurrency, environment.tags
    )
    try:
        await environment.check()
        with phase(f"asking for the model {server.model} at {mask_text(server.url)}"):
            window = await sampler.check()
        limits = limits_within(config, window)
        yield SearchAgent(sampler, environment, tokenizer, template, limits, sampling)
    finally:
        await sampler.close()
        await environment.close()
