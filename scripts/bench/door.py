"""What a call of a program to the policy costs, and whether any is lost: many sessions at once, by OpenAI's client.

    .venv/bin/python scripts/bench/door.py [--sessions 256] [--calls 40] [--rounds 3]

Each session is a rollout, played by a program in another process that makes its calls one after the other: ten turns of
a conversation with tool calls, then the next conversation. The policy answers at once with random ids, so what is timed
is everything else. Checked is every call: the ids and log-probs that the client got are those that were sampled, after
the ids that the client was told, and the record of the rollout has all of them once.

The baseline is the same client at a server that answers each request with a constant. The two take turns; printed are
the median milliseconds of both for each call, with all sessions at once, and the processor time of the serving process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request, Response

from search_r1.data.tinywiki.build import train_chat_tokenizer
from search_r1.serve import policy_endpoint
from search_r1.serve.policy_endpoint import PolicyEndpoint
from verl.agent.environment import Generation, Sampling
from verl.agent.episode import EpisodeLimits, run_episode
from verl.agent.program import ProgramEnvironment
from verl.agent.program_kinds import Program, ProgramTask
from verl.protocol import Prompt, Source, Status, Trajectory

TURNS = 10  # of a conversation
TOOLS = [
    {
        "type": "function",
        "function": {"name": "search", "parameters": {"type": "object", "properties": {"query": {"type": "string"}}}},
    }
]
Heard = dict[str, Any]
"""A call as its client saw it: `prompt`, `ids` and `log_probs`."""


class RandomPolicy:
    """Answers at once; keeps what it was asked and what it gave. Its ids are those of no text that would be read so."""

    def __init__(self, vocabulary: int, end: int, seed: int) -> None:
        self._draws, self._vocabulary, self._end = random.Random(seed), vocabulary, end
        self.given: list[Heard] = []

    async def generate(self, ids: Sequence[int], sampling: Sampling) -> Generation:
        said = (*self._draws.choices(range(3, self._vocabulary), k=24), self._end)
        log_probs = tuple(-self._draws.random() for _ in said)
        self.given.append({"prompt": list(ids), "ids": list(said), "log_probs": list(log_probs)})
        return Generation(said, log_probs, "stop")


@dataclass
class Programs(Program):
    """The programs of all sessions: they wait until the client in another process has done their work."""

    tasks: list[ProgramTask] = field(default_factory=list)
    done: asyncio.Event = field(default_factory=asyncio.Event)

    async def play(self, task: ProgramTask) -> None:
        self.tasks.append(task)
        await self.done.wait()


async def through_the_door(num_sessions: int, num_calls: int, seed: int) -> tuple[float, float]:
    """Milliseconds a call, in all and of this process. Raises AssertionError for a call that is lost or changed."""
    tokenizer = train_chat_tokenizer()
    limits = EpisodeLimits(num_calls, 64, 20_000)
    programs = Programs()
    environment = ProgramEnvironment("bench", programs, PolicyEndpoint(), tokenizer, limits)
    asked = [{"role": "user", "content": "Who was it?"}]
    end = environment.format_for(with_tools=True).stop_token_ids[0]
    policies = [RandomPolicy(len(tokenizer), end, seed * num_sessions + number) for number in range(num_sessions)]
    prompt = Prompt(environment.prompt_ids(asked), "bench", {}, messages=asked)
    playing = []
    for number, policy in enumerate(policies):
        among = (policy, environment, tokenizer, Sampling(), limits, None)
        playing.append(asyncio.create_task(run_episode(prompt, str(number), *among)))
        while len(programs.tasks) <= number:
            await asyncio.sleep(0.001)
    used = time.process_time()
    seconds, heard = await clients([(task.base_url, task.api_key) for task in programs.tasks], num_calls)
    used = time.process_time() - used
    programs.done.set()
    rollouts = await asyncio.gather(*playing)
    await environment.close()
    for one, policy, rollout in zip(heard, policies, rollouts, strict=True):
        check(one, policy.given, rollout, num_calls)
    return (1000 * value / (num_sessions * num_calls) for value in (seconds, used))  # type: ignore[return-value]


def check(heard: list[Heard], given: list[Heard], rollout: Trajectory, num_calls: int) -> None:
    """Raise AssertionError unless client, sampler and record have the same calls."""
    assert rollout.status is Status.ANSWERED and len(given) == len(heard) == num_calls == rollout.num_turns
    assert heard == given, "the client got other ids than were sampled"
    recorded = [(list(one.ids), list(one.log_probs or ())) for one in rollout.segments if one.source is Source.POLICY]
    assert recorded == [(one["ids"], one["log_probs"]) for one in given]
    whole = [token for sequence in rollout.sequences for part in sequence for token in part.ids]
    ends = given[TURNS - 1 :: TURNS] + ([] if num_calls % TURNS == 0 else given[-1:])
    assert whole == [token for one in ends for token in (*one["prompt"], *one["ids"])], "contexts of the record"


async def at_a_constant(num_sessions: int, num_calls: int) -> tuple[float, float]:
    """Milliseconds a call, in all and of this process, where each request gets the same reply."""
    message = {"role": "assistant", "content": "It is a short text of some words.", "tool_calls": None}
    choice = {"index": 0, "message": message, "finish_reason": "stop", "token_ids": [5] * 25}
    choice["logprobs"] = {"content": [{"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": []}] * 25}
    usage = {"prompt_tokens": 100, "completion_tokens": 25, "total_tokens": 125}
    head = {"id": "x", "object": "chat.completion", "created": 0, "model": "m", "prompt_token_ids": [5] * 100}
    body = json.dumps(head | {"choices": [choice], "usage": usage}).encode()
    app = FastAPI()

    @app.post("/v1/chat/completions")
    async def answer(http: Request) -> Response:
        await http.body()
        return Response(body, media_type="application/json")

    # The door's own way to serve, with another app.
    endpoint, create_app = PolicyEndpoint(), policy_endpoint.create_app
    policy_endpoint.create_app = lambda *_: app  # type: ignore[assignment]
    try:
        await endpoint.start(None, None, "127.0.0.1")  # type: ignore[arg-type]
    finally:
        policy_endpoint.create_app = create_app
    url = endpoint.base_url("x").replace("/sessions/x", "")
    used = time.process_time()
    seconds, _ = await clients([(url, "key")] * num_sessions, num_calls)
    used = time.process_time() - used
    await endpoint.close()
    return (1000 * value / (num_sessions * num_calls) for value in (seconds, used))  # type: ignore[return-value]


async def clients(addresses: Sequence[tuple[str, str]], num_calls: int) -> tuple[float, list[list[Heard]]]:
    """What the clients of all sessions got, from a process of their own, and the seconds that it took them."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, __file__, "--client", str(num_calls)), stdin=pipe, stdout=pipe, limit=1 << 30
    )
    printed, _ = await process.communicate(json.dumps(list(addresses)).encode())
    assert process.returncode == 0, f"the clients ended with status {process.returncode}"
    seconds, heard = json.loads(printed)
    return seconds, heard


async def client_process(num_calls: int) -> None:
    """The process of the clients: addresses and keys come on its input, what was heard goes to its output."""
    import httpx
    from openai import AsyncOpenAI

    addresses = json.loads(sys.stdin.read())
    async with httpx.AsyncClient(limits=httpx.Limits(max_connections=None), timeout=600) as shared:

        async def session(url: str, key: str) -> list[Heard]:
            client, heard, messages = AsyncOpenAI(base_url=url, api_key=key, http_client=shared), list[Heard](), []
            for number in range(num_calls):
                if number % TURNS == 0:
                    messages = [{"role": "user", "content": f"Who was number {number}?"}]
                reply = await client.chat.completions.create(
                    model="m", messages=messages, tools=TOOLS, logprobs=True, extra_body={"return_token_ids": True}
                )
                choice = reply.choices[0]
                heard.append(
                    {
                        "prompt": reply.prompt_token_ids,  # type: ignore[attr-defined]
                        "ids": choice.token_ids,  # type: ignore[attr-defined]
                        "log_probs": [one.logprob for one in choice.logprobs.content],
                    }
                )
                messages += [choice.message.model_dump(exclude_none=True), {"role": "user", "content": "And then?"}]
            return heard

        started = time.perf_counter()
        heard = await asyncio.gather(*(session(url, key) for url, key in addresses))
        print(json.dumps([time.perf_counter() - started, heard]))


def medians(rounds: Iterable[tuple[float, float]]) -> list[float]:
    return [statistics.median(column) for column in zip(*rounds, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description="What a call of a program to the policy costs.")
    parser.add_argument("--sessions", type=int, default=256, help="at once (default: %(default)s)")
    parser.add_argument("--calls", type=int, default=40, help="of each session (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--client", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.client is not None:
        asyncio.run(client_process(args.client))
        return
    sides: dict[str, list[tuple[float, float]]] = {"the door": [], "a constant": []}
    works: dict[str, Callable[[int], Awaitable[tuple[float, float]]]] = {
        "the door": lambda seed: through_the_door(args.sessions, args.calls, seed),
        "a constant": lambda _: at_a_constant(args.sessions, args.calls),
    }
    for number in range(args.rounds):
        for name, work in works.items():
            sides[name].append(tuple(asyncio.run(work(number))))  # type: ignore[arg-type]
    calls = args.sessions * args.calls
    print(f"{calls} calls of {args.sessions} sessions at once, {args.rounds} rounds: none lost, none changed")
    print("| side | ms a call | of it in the serving process |")
    print("|---|---|---|")
    for name, rounds in sides.items():
        whole, own = medians(rounds)
        print(f"| {name} | {whole:.2f} | {own:.2f} |")


if __name__ == "__main__":
    main()
