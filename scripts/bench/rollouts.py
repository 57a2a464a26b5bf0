"""Trajectories per second of a rollout worker, beside loops in which all trajectories wait for each other.

    .venv/bin/python scripts/bench/rollouts.py --run runs/tinywiki_default_seed0 --retriever_ms 200 --tail_ms 100

`--run` is a folder of scripts/quickstart.sh, of which the data and the warm-started policy are read. The engine, the
agent and the retrieval server are those of a run; there is no Ray between them, and no training. The sides take turns
on the same prompts and seeds, and have to give the same ids:

    episodes      as in a run: an episode waits for nobody
    synchronous   the published generation loop of Search-R1, on the same engine: all live trajectories take a turn, and
                  when the last one has, all their queries are one request
    in_process    the same loop with `LLM.generate` of vLLM in this process, which is how TRL samples
    over_sample   steps with `rollout.over_sample`: more prompts are in progress, a step ends when enough groups are
                  complete, and the others are resumed in the next one. Its ids are its own. `age` is how many steps ago
                  a step's groups were begun, on average. A side for each value of `--over_sample`

Each step begins with an empty prefix cache, as under new weights. `--retriever_ms` puts slow_retriever.py in front of
the server. `idle` is the share of time in which the engine has no request. `--set key=value` changes settings of the
run. The last line is JSON, with medians of the rounds; seconds are of all `--steps` of a round.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import math
import os
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

import psutil
import servers
import torch

from verl.agent.environment import Generation, Sampling, SamplingMode, sampling_of
from verl.agent.episode import EpisodeLimits, run_episode
from verl.config import Config, load_config
from verl.data.prompts import PromptSource
from verl.protocol import Trajectory
from verl.rollout.engine_settings import engine_args, engine_variables
from verl.rollout.episode_queue import EpisodeQueue, Group, groups_of
from verl.rollout.worker import EpisodeRequest, RolloutWorker, settings_of
from verl.run.last_checkpoint import last_checkpoint
from verl.trainer.sampling.collection import Selection

ALL_IN_ONE = 1_000_000  # queries a request
SIDES = ("episodes", "synchronous", "in_process", "over_sample")

Batch = Sequence[tuple[Sequence[int], Sampling]]
Play = Callable[[Sequence[EpisodeRequest]], Awaitable[list[Trajectory]]]


def main() -> None:
    options = parser().parse_args()
    with retriever(options) as url:
        print(json.dumps(asyncio.run(Bench(options, config_of(options, url)).run())))


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--run", type=Path, required=True)
    found.add_argument("--config", default="tinywiki")
    found.add_argument("--trajectories", type=int, default=384, help="in a step; a prompt has rollout.n_agent of them")
    found.add_argument("--steps", type=int, default=3, help="of each side in a round, after one that does not count")
    found.add_argument("--rounds", type=int, default=3)
    found.add_argument("--retriever_ms", type=float, default=0.0)
    found.add_argument("--tail_ms", type=float, default=0.0, help="mean of the exponential part, of each query")
    found.add_argument("--draw", choices=["query", "request"], default="query", help="see slow_retriever.py")
    found.add_argument("--sides", nargs="+", choices=SIDES, default=["episodes", "synchronous"])
    found.add_argument(
        "--over_sample", type=float, nargs="+", default=[0.5], help="prompts beyond the batch, as a share of it"
    )
    found.add_argument("--max_staleness", type=int, default=1, help="steps for which a group may be carried over")
    found.add_argument("--set", nargs="*", default=[], metavar="key=value", help="settings of the run")
    return found


@contextlib.contextmanager
def retriever(options: argparse.Namespace) -> Iterator[str]:
    """The address of a retrieval server, which is as slow as it should be."""
    corpus = ["--corpus_path", str(options.run / "data/corpus.jsonl"), "--topk", "1", "--retriever_name", "bm25"]
    cores = sorted(os.sched_getaffinity(0))
    with contextlib.ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        command = ["-m", "search_r1.search.retrieval_server", *corpus]
        found = stack.enter_context(servers.server(command, cores, logs / "server.log"))
        if options.retriever_ms or options.tail_ms:
            delay = ["--ms", str(options.retriever_ms), "--tail_ms", str(options.tail_ms), "--draw", options.draw]
            script = str(Path(__file__).with_name("slow_retriever.py"))
            command = [script, "--upstream", found.url, "--cap_ms", str(5 * options.retriever_ms), *delay]
            found = stack.enter_context(servers.server(command, cores, logs / "slow.log"))
        yield f"{found.url}/retrieve"


def config_of(options: argparse.Namespace, url: str) -> Config:
    own = [
        f"actor_rollout_ref.model.path={last_checkpoint(options.run / 'sft')}",
        f"data.train_files={options.run / 'data/train.parquet'}",
        f"data.val_files={options.run / 'data/validation.parquet'}",
        f"retriever.url={url}",
    ]
    return load_config(options.config, [*own, *options.set])


class Bench:
    """One worker, and the sides in turn."""

    def __init__(self, options: argparse.Namespace, config: Config) -> None:
        self.options, self.config = options, config
        self.worker = RolloutWorker(config, "cpu")

    async def run(self) -> dict[str, dict[str, float]]:
        """Medians by side and figure."""
        retrievers = psutil.Process().children(recursive=True)
        try:
            await self.worker.start()
            engine = [one for one in psutil.Process().children(recursive=True) if one not in retrievers]
            self.watched = Watched(self.worker.engine, [psutil.Process(), *engine])
            self.worker.engine = self.watched  # type: ignore[assignment]
            data = self.config.data
            self.prompts = PromptSource(
                data.train_files,
                self.worker.tokenizer,
                max_start_length=data.max_start_length,
                tags=self.worker.environment.tags,
            )
            seen = await self.rounds()
        finally:
            await self.worker.shutdown()
        return {side: {name: median(one[name] for one in found) for name in found[0]} for side, found in seen.items()}

    async def rounds(self) -> dict[str, list[dict[str, float]]]:
        """Of each side its steps in a row, so that what it carries over gains nothing while others play."""
        sides, steps = self.sides(), self.options.steps
        seen: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
        for number in range(self.options.rounds + 1):
            requests = [self.requests(number * (steps + 1) + step) for step in range(steps + 1)]
            ids = []
            for side, play in sides.items():
                await asyncio.sleep(0.7)  # connections of the side before end
                await self.step(play, requests[0])
                self.watched.begin()
                played = [await self.step(play, one) for one in requests[1:]]
                trajectories = [trajectory for step in played for trajectory in step]
                found = figures(trajectories, self.watched)
                if isinstance(play, OverSampled):
                    found["age"] = round(play.take_age(), 2)
                else:
                    ids.append([trajectory.ids for trajectory in trajectories])
                if number:  # in the first one memory and connections are new
                    seen[side].append(found)
            assert all(other == ids[0] for other in ids), "the sides sampled different ids"
        return seen

    async def step(self, play: Play, requests: Sequence[EpisodeRequest]) -> list[Trajectory]:
        """With an empty cache, as under new weights: else a side would find in it what the one before has sampled."""
        assert await self.worker.engine._llm.reset_prefix_cache()
        return await play(requests)

    def requests(self, step: int) -> list[EpisodeRequest]:
        n = self.config.actor_rollout_ref.rollout.n_agent
        groups = groups_of(self.prompts.next(self.options.trajectories // n), ["train"] * n, step)
        queue = EpisodeQueue(self.config, groups, step)
        return queue.take(len(queue.waiting))

    def sides(self) -> dict[str, Play]:
        found: dict[str, Play] = {}
        for name in self.options.sides:
            if name == "episodes":
                found[name] = self.episodes
            elif name == "over_sample":
                for share in self.options.over_sample:
                    worker = self.worker
                    found[f"{name}={share:g}"] = OverSampled(self.config, worker, share, self.options.max_staleness)
            elif name == "synchronous":
                found[name] = partial(self.together, sample_all=self.all_at_once)
            else:
                found[name] = partial(InProcess(self.config, self.watched).play, self)
        return found

    async def episodes(self, requests: Sequence[EpisodeRequest]) -> list[Trajectory]:
        found: dict[int, Trajectory] = {}
        new = requests
        while len(found) < len(requests):
            found |= dict(await self.worker.play(new))
            new = []
        return [found[request.slot] for request in requests]

    async def all_at_once(self, batch: Batch) -> list[Generation]:
        return await asyncio.gather(*(self.watched.generate(ids, sampling) for ids, sampling in batch))

    async def together(
        self, requests: Sequence[EpisodeRequest], sample_all: Callable[[Batch], Awaitable[list[Generation]]]
    ) -> list[Trajectory]:
        """The same episodes, which sample when the last of them is ready to; so they ask together, too."""
        turns = Turns(len(requests), sample_all)
        client: Any = self.worker.environment._searcher._engine  # type: ignore[attr-defined]
        before = client._max_batch
        client._max_batch = client._list_size = ALL_IN_ONE
        try:
            return await asyncio.gather(*(self.play(request, turns) for request in requests))
        finally:
            client._max_batch = client._list_size = before

    async def play(self, request: EpisodeRequest, turns: Turns) -> Trajectory:
        worker, sampling = self.worker, sampling_of(self.config, "train")
        among = (request.prompt, request.group_id, turns, worker.environment, worker.tokenizer)
        try:
            return await run_episode(*among, sampling, worker.limits, request.seed)
        finally:
            turns.leave()


def figures(trajectories: Sequence[Trajectory], watched: Watched) -> dict[str, float]:
    seconds = watched.seconds
    failed = [trajectory.failure for trajectory in trajectories if trajectory.failure]
    assert not failed, failed[0]
    sampled = sum(len(part.ids) for one in trajectories for part in one.segments if part.log_probs)
    worker_s, engine_s = watched.processor_s
    return {
        "trajectories_s": round(len(trajectories) / seconds, 1),
        "seconds": round(seconds, 3),
        "idle": round(watched.idle_s / seconds, 3),
        "worker_processor_s": round(worker_s, 2),
        "engine_processor_s": round(engine_s, 2),
        "tokens_s": round(sampled / seconds),
        "turns": round(sum(one.num_turns for one in trajectories) / len(trajectories), 2),
        "searches": round(sum(one.num_searches for one in trajectories) / len(trajectories), 2),
    }


class Watched:
    """The engine, and what has been spent since `begin`: time, time without a request, and processor time."""

    def __init__(self, engine: Any, processes: Sequence[psutil.Process]) -> None:
        self._engine, self._processes, self._running = engine, processes, 0
        self.begin()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def begin(self) -> None:
        self._begun = self._latest = time.perf_counter()
        self.idle_s = 0.0
        self._processor = self._processor_now()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._begun

    @property
    def processor_s(self) -> tuple[float, float]:
        """Of the worker's process and of the engine's."""
        worker, *engine = (now - then for now, then in zip(self._processor_now(), self._processor, strict=True))
        return worker, sum(engine)

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        if not self._running:
            self.idle_s += time.perf_counter() - self._latest
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1
            self._latest = time.perf_counter()

    async def generate(self, ids: Sequence[int], sampling: Sampling) -> Generation:
        with self.busy():
            return await self._engine.generate(ids, sampling)  # type: ignore[no-any-return]

    def _processor_now(self) -> list[float]:
        spent = [process.cpu_times() for process in self._processes]
        return [one.user + one.system for one in spent]


class OverSampled:
    """Steps of as many trajectories as are asked for, with what is carried over between them."""

    def __init__(self, config: Config, worker: RolloutWorker, share: float, max_staleness: int) -> None:
        self._config, self._worker, self._step = config, worker, 0
        self._share, self._max_staleness = share, max_staleness
        self._carried: list[Group] = []
        self._ages: list[int] = []
        data, rollout = config.data, config.actor_rollout_ref.rollout
        self._prompts = PromptSource(
            data.train_files, worker.tokenizer, max_start_length=data.max_start_length, tags=worker.environment.tags
        )
        self._modes: list[SamplingMode] = ["train"] * rollout.n_agent

    async def __call__(self, requests: Sequence[EpisodeRequest]) -> list[Trajectory]:
        wanted, step = len(requests) // len(self._modes), self._next_step()
        numbers = itertools.count()

        def new_groups(number: int) -> list[Group]:
            return [
                group
                for prompt in self._prompts.next(number)
                for group in groups_of([prompt], self._modes, step, next(numbers))
            ]

        most = wanted + math.ceil(self._share * wanted)
        due = [group for group in self._carried if step - group.step >= self._max_staleness]
        groups = self._carried + new_groups(most - len(self._carried))
        selection = Selection(wanted, most, new_groups, lambda new, wait: [True] * len(new), groups, due)
        await self._play(EpisodeQueue(self._config, groups, step, selection.next_groups))
        self._carried = selection.left
        self._ages += [step - group.step for group in selection.taken]
        return [trajectory for group in selection.taken for trajectory in group.trajectories("train")]

    def take_age(self) -> float:
        """How many steps ago the groups since the last call were begun, in the mean."""
        ages, self._ages = self._ages, []
        return mean(ages)

    def _next_step(self) -> int:
        self._step += 1
        return self._step

    async def _play(self, queue: EpisodeQueue) -> None:
        queue.settle()
        while not queue.is_enough:
            for slot, trajectory in await self._worker.play(queue.take(len(queue.waiting))):
                queue.record(slot, trajectory)
            queue.settle()
        for slot, trajectory in await self._worker.interrupt():
            queue.record(slot, trajectory)


class Turns:
    """A sampler that begins when all have asked that did not leave, and answers all of them at once."""

    def __init__(self, number: int, sample_all: Callable[[Batch], Awaitable[list[Generation]]]) -> None:
        self._number, self._sample_all = number, sample_all
        self._asked: list[tuple[Sequence[int], Sampling, asyncio.Future[Generation]]] = []

    async def generate(self, ids: Sequence[int], sampling: Sampling) -> Generation:
        answer: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        self._asked.append((ids, sampling, answer))
        self._begin()
        return await answer

    def leave(self) -> None:
        self._number -= 1
        self._begin()

    def _begin(self) -> None:
        if self._asked and len(self._asked) == self._number:
            self._turn = asyncio.ensure_future(self._sample())

    async def _sample(self) -> None:
        asked, self._asked = self._asked, []
        found = await self._sample_all([(ids, sampling) for ids, sampling, _ in asked])
        for (_, _, answer), generation in zip(asked, found, strict=True):
            answer.set_result(generation)


class InProcess:
    """vLLM's own `LLM` in this process, with the settings of the worker's engine."""

    def __init__(self, config: Config, watched: Watched) -> None:
        settings = settings_of(config, EpisodeLimits.from_config(config).window, "cpu")
        variables = engine_variables(settings, on_cpu=True)
        os.environ |= variables
        torch.set_num_threads(int(variables["OMP_NUM_THREADS"]))  # torch has read the environment before
        from vllm import LLM
        from vllm.engine.arg_utils import EngineArgs

        given = engine_args(settings, on_cpu=True)
        own = {one.name: getattr(given, one.name) for one in fields(EngineArgs)}
        own["scheduler_cls"] = None
        self._watched, self._llm = watched, LLM(**{name: value for name, value in own.items() if value is not None})

    async def play(self, bench: Bench, requests: Sequence[EpisodeRequest]) -> list[Trajectory]:
        assert self._llm.reset_prefix_cache()
        return await bench.together(requests, self.sample_all)

    async def sample_all(self, batch: Batch) -> list[Generation]:
        from vllm import SamplingParams, TokensPrompt

        how = [
            SamplingParams(
                max_tokens=sampling.max_tokens,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                seed=sampling.seed,
                stop=list(sampling.stop),
                include_stop_str_in_output=True,
                skip_special_tokens=False,
                logprobs=0,
            )
            for _, sampling in batch
        ]
        prompts = [TokensPrompt(prompt_token_ids=list(ids)) for ids, _ in batch]
        with self._watched.busy():
            outputs = self._llm.generate(prompts, how, use_tqdm=False)  # nothing else goes on in this loop
        return [_generation(output.outputs[0]) for output in outputs]


def _generation(completion: Any) -> Generation:
    ids = tuple(completion.token_ids)
    log_probs = tuple(found[token].logprob for token, found in zip(ids, completion.logprobs, strict=True))
    return Generation(ids, log_probs, completion.finish_reason)


if __name__ == "__main__":
    main()
