"""vLLM's own configuration objects for our settings, in our placement."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import first_imports
import pytest
import torch
from fake_cuda import pretend_cuda
from run_config import run_config
from tiny_models import qwen2_config, save_untrained
from transformers import CLIPConfig

from verl.agent.environment import Sampling
from verl.errors import RolloutError
from verl.rollout.engine_settings import EngineSettings, engine_args, preload_variable
from verl.rollout.worker import settings_of
from verl.single_controller import ResourcePool

SIZES = (1, 2, 4, 8)


class Engine:
    """In the place of a rollout engine's actor."""

    def config_of(self, settings: EngineSettings, visible: str) -> dict[str, Any]:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible
        pretend_cuda()
        from vllm.v1.executor import Executor

        config = engine_args(settings, on_cpu=False).create_engine_config()
        return {
            "executor": Executor.get_class(config).__name__,
            "worker": config.parallel_config.worker_cls,
            "graphs": config.compilation_config.cudagraph_mode.name,
            "sequences": config.scheduler_config.max_num_seqs,
            "tokens": config.scheduler_config.max_num_batched_tokens,
            "chunked": config.scheduler_config.enable_chunked_prefill,
            "prefixes": config.cache_config.enable_prefix_caching,
            "sleeps": config.model_config.enable_sleep_mode,
        }

    def answer_of(self, settings: EngineSettings, ids: list[int]) -> list[int]:
        from verl.rollout.engine import VLLMEngine

        async def answer() -> list[int]:
            engine = VLLMEngine(settings)
            try:
                await engine.start()
                return list((await engine.generate(ids, Sampling(temperature=0.0, max_tokens=8))).ids)
            finally:
                engine.shutdown()

        return asyncio.run(answer())


@pytest.fixture(scope="module")
def pool(ray_session: Any) -> Any:
    pool = ResourcePool(1, 8, "cuda")
    pool.reserve(600)  # until a worker process of Ray has started
    yield pool
    pool.release()


@pytest.fixture(scope="module")
def divisible_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that eight ranks can share."""
    config = qwen2_config(320, 256, 256, 2, (8, 8), 1024, initializer_range=0.1, dtype="float32")
    return save_untrained(config, tmp_path_factory.mktemp("divisible_model"))


@pytest.fixture(scope="module")
def configs(ray_session: Any, pool: ResourcePool, divisible_model_dir: Path) -> dict[int, dict[str, Any]]:
    actor = ray_session.remote(Engine).options(**pool.actor_options(0, 8)).remote()
    found = {}
    for ranks in SIZES:
        settings = EngineSettings(
            str(divisible_model_dir), max_model_len=1024, tensor_parallel_size=ranks, sleep_mode=True, device="cuda"
        )
        visible = ",".join(pool.nodes[0].devices[:ranks])
        found[ranks] = ray_session.get(actor.config_of.remote(settings, visible))
    ray_session.kill(actor)
    return found


def test_an_engine_of_several_ranks_in_a_placement_group_starts_them_itself(configs: dict[int, dict[str, Any]]) -> None:
    executors = [configs[ranks]["executor"] for ranks in SIZES]
    assert executors == ["UniProcExecutor", "MultiprocExecutor", "MultiprocExecutor", "MultiprocExecutor"]
    assert {configs[ranks]["worker"] for ranks in SIZES} == {"vllm.v1.worker.gpu_worker.Worker"}


def test_on_a_gpu_there_are_graphs_chunks_and_shared_prefixes(configs: dict[int, dict[str, Any]]) -> None:
    for found in configs.values():
        assert found["graphs"] != "NONE" and found["chunked"] and found["prefixes"] and found["sleeps"]
        assert (found["sequences"], found["tokens"]) == (1024, 8192)


def test_on_cpu_nothing_is_compiled_and_no_prompt_is_cut(tiny_model_dir: Path) -> None:
    model = str(tiny_model_dir)
    args = engine_args(EngineSettings(model, max_model_len=20000), on_cpu=True)
    assert args.enforce_eager and not args.enable_chunked_prefill and args.max_num_batched_tokens == 20000
    assert not engine_args(EngineSettings(model, 512, enforce_eager=False), on_cpu=True).enforce_eager
    assert engine_args(EngineSettings(model, 512, enforce_eager=True), on_cpu=False).enforce_eager


@pytest.mark.parametrize(
    ("kind", "flag", "small", "large", "unknown"),
    [
        ("cpu", "avx512_bf16", "float32", "bfloat16", "bfloat16"),
        ("cpu", "avx512_f", "float32", "float32", "float32"),
        ("cuda", "avx512_f", "bfloat16", "bfloat16", "bfloat16"),
    ],
)
def test_the_number_format_is_by_default_the_trainers(
    kind: str,
    flag: str,
    small: str,
    large: str,
    unknown: str,
    tiny_model_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a model of 0.3 million parameters, one of 113 million, and one that no trainer could load."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {flag: True, "cpu_name": "some"})
    for name, config in (("large", qwen2_config(50_000, 1024, 3072, 5, (16, 4), 1024)), ("unknown", CLIPConfig())):
        config.save_pretrained(tmp_path / name)

    def chosen(model: Path, *overrides: str) -> str:
        return settings_of(run_config([f"actor_rollout_ref.model.path={model}", *overrides]), 64, kind).dtype

    found = [chosen(model) for model in (tiny_model_dir, tmp_path / "large", tmp_path / "unknown")]
    assert found == [small, large, unknown]
    assert chosen(tiny_model_dir, "actor_rollout_ref.rollout.dtype=float16") == "float16"


@pytest.mark.parametrize(("flag", "lines"), [("avx512_bf16", 0), ("avx512_f", 1)])
def test_bfloat16_on_a_cpu_without_it_is_told(
    flag: str, lines: int, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {flag: True, "cpu_name": "some"})
    asked = [f"actor_rollout_ref.model.path={tiny_model_dir}", "actor_rollout_ref.rollout.dtype=bfloat16"]
    assert settings_of(run_config(asked), 64, "cpu").dtype == "bfloat16"
    assert sum("several times as long as in float32" in record.getMessage() for record in caplog.records) == lines


def test_an_engine_that_gets_no_weights_reads_them(tiny_model_dir: Path) -> None:
    """Also with the settings of a run whose engines get them: as of `--run`."""
    dummy = "actor_rollout_ref.rollout.load_format=dummy"
    config = run_config([f"actor_rollout_ref.model.path={tiny_model_dir}", dummy])
    assert settings_of(config, 64, "cpu").load_format == "auto"
    assert settings_of(config, 64, "cpu", gets_weights=True).load_format == "dummy"


@pytest.mark.parametrize("seed", [0, 7, 2**32 - 1, 2**32, 2**63])
def test_each_engine_of_a_run_has_a_seed_of_its_own_that_vllm_takes(tiny_model_dir: Path, seed: int) -> None:
    """NumPy takes none of 2^32 or more. That of the first engine is the run's."""
    config = run_config([f"actor_rollout_ref.model.path={tiny_model_dir}", f"trainer.seed={seed}"])
    seeds = [settings_of(config, 64, "cpu", number=number).seed for number in range(64)]
    assert len(set(seeds)) == 64 and all(0 <= one < 2**32 for one in seeds)
    assert seeds[0] == settings_of(config, 64, "cpu").seed == seed % 2**32


@pytest.mark.parametrize(
    ("overrides", "threads"),
    [
        (["num_engines=1"], 16),
        (["num_engines=2"], 8),
        (["num_engines=4", "nnodes=4", "trainer.layout=split"], 16),
        (["num_engines=8", "nnodes=4", "trainer.layout=split"], 8),
        (["num_engines=4", "trainer.nnodes=4", "trainer.n_gpus_per_node=1"], 16),
        (["num_engines=5", "trainer.nnodes=4", "trainer.n_gpus_per_node=1"], 8),
        (["num_engines=3", "trainer.nnodes=2", "trainer.n_gpus_per_node=2"], 8),  # two and one
    ],
)
def test_the_engines_of_a_node_share_its_cores_but_one(
    overrides: list[str], threads: int, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of other nodes do not count, nor does what a run would have for an engine that is alone."""
    monkeypatch.setattr("verl.process.startup.usable_cores", lambda: 17)
    own = [one if one.startswith("trainer.") else f"actor_rollout_ref.rollout.{one}" for one in overrides]
    config = run_config([f"actor_rollout_ref.model.path={tiny_model_dir}", "trainer.device=cpu", *own])
    assert settings_of(config, 64, "cpu", gets_weights=True).num_threads == threads
    assert settings_of(config, 64, "cpu").num_threads == 16


def test_what_is_preloaded_has_no_space_in_its_path(tmp_path: Path) -> None:
    """A loader that is given the list finds both libraries; where the folder has no space vLLM's own list will do."""
    packages, links = tmp_path / "my packages", tmp_path / "links"
    libraries = ("vllm/libs/libtcmalloc_minimal-1.so.4", "torch/lib/libgomp.so.1")
    for folder in (links, *((packages / library).parent for library in libraries)):
        folder.mkdir(parents=True)
    for library in libraries:
        (packages / library).touch()
    [(name, listed)] = preload_variable(packages, links).items()
    found = [Path(item).resolve() for item in re.split("[ :]", listed)]
    assert name == "LD_PRELOAD" and found == [packages / library for library in libraries]
    assert preload_variable(links, tmp_path) == {}


def test_the_process_of_an_engine_runs_a_module_of_ours_first_and_no_program(
    monkeypatch: pytest.MonkeyPatch, tiny_model_dir: Path
) -> None:
    """So a program that starts engines needs no guard, and nothing of it is imported twice. And it ends as soon as its
    exit functions have returned.
    """
    from verl.rollout import engine

    told: list[Any] = []

    def start(_: object) -> None:
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        process = context.Process(target=first_imports.tell, args=(there,))
        process.start()
        there.close()
        with pytest.raises(EOFError):
            while True:
                told.append(here.recv())
        process.join()
        assert process.exitcode == 0
        raise ValueError("enough")

    before = sys.modules["__main__"].__spec__
    monkeypatch.setattr(engine.AsyncLLM, "from_engine_args", start)
    with pytest.raises(RolloutError, match="enough"):
        engine.VLLMEngine(EngineSettings(str(tiny_model_dir), 64, device="cpu"))
    assert told == [("verl.rollout.engine_process", True), "exit functions were called"]
    assert sys.modules["__main__"].__spec__ is before


def test_the_process_of_an_engine_of_several_ranks_ends_with_its_owner() -> None:
    """Its ranks see to it: nothing else ties it to the process that started it."""
    from verl.rollout.weight_sync import end_with

    owner, engine = (subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) for _ in range(2))
    watcher = threading.Thread(target=end_with, args=(engine.pid, owner.pid))
    watcher.start()
    assert engine.poll() is None
    owner.kill()
    watcher.join(timeout=60)
    assert engine.wait(timeout=60) == -signal.SIGKILL
    owner.wait(timeout=60)


@pytest.mark.slow
def test_two_ranks_answer_as_one_inside_a_placement_group(
    ray_session: Any, pool: ResourcePool, divisible_model_dir: Path
) -> None:
    """On CPU, where vLLM has tensor parallelism too; before, it asked Ray for the ranks and did not start."""
    answers = []
    for ranks in (1, 2):
        settings = EngineSettings(
            str(divisible_model_dir),
            max_model_len=256,
            dtype="float32",
            kv_cache_gib=0.0625,
            tensor_parallel_size=ranks,
            num_threads=1,
            max_num_seqs=8,
        )
        actor = ray_session.remote(Engine).options(**pool.actor_options(2, ranks)).remote()
        answers.append(ray_session.get(actor.answer_of.remote(settings, [5, 6, 7, 8]), timeout=1200))
        ray_session.kill(actor)
    assert answers[0] == answers[1] and len(answers[0]) == 8
