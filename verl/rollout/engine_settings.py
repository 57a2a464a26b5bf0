"""What one engine is started with, by device (typed settings, vLLM's arguments for them, environment variables), and
what its processes have printed: vLLM's own errors only say that the cause is above.
"""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.process.by_name import in_words
from verl.process.startup import CPU_ENGINE_VARIABLES, ENGINE_VARIABLES, engine_threads

if TYPE_CHECKING:
    from vllm.engine.arg_utils import AsyncEngineArgs

GIB = 2**30
DUMMY = "dummy"  # vLLM's load format of an engine that reads no weights
KEEP, DISCARD = 1, 2  # vLLM's sleep levels: weights are copied to host memory, or dropped


@dataclass(frozen=True)
class EngineSettings:
    """Settings of one engine.

    max_model_len: maximum number of tokens of context and continuation together.
    kv_cache_gib: memory of the key-value cache on CPU; on a GPU `gpu_memory_utilization` (a fraction) decides.
    enforce_eager: run without CUDA graphs; None: with CUDA graphs on a GPU, without a compiler on CPU.
    tensor_parallel_size: ranks of the engine, each with its own process and device, all on this node.
    num_threads: CPU threads of the model; None: see `verl.process.startup`.
    load_format: vLLM's; with "dummy" the engine has random weights, and cannot sample before it is given others.
    sleep_mode: let `sleep` free GPU memory.
    batch_invariant: on a GPU, kernels whose results do not depend on what else is in the batch. On CPU they are anyway.
    """

    model_path: str
    max_model_len: int
    dtype: str = "auto"
    kv_cache_gib: float = 1.0
    gpu_memory_utilization: float = 0.5
    enforce_eager: bool | None = None
    tensor_parallel_size: int = 1
    seed: int = 0
    num_threads: int | None = None
    max_num_seqs: int = 1024
    max_num_batched_tokens: int = 8192
    load_format: str = "auto"
    device: str = "auto"
    trust_remote_code: bool = False
    sleep_mode: bool = False
    batch_invariant: bool = False

    def is_eager(self, on_cpu: bool) -> bool:
        return on_cpu if self.enforce_eager is None else self.enforce_eager

    @property
    def sleep_level(self) -> int:
        """vLLM's level. A sync replaces all weights of a dummy engine; one that has read the model's files may have
        some, scales for instance, that no trainer sends: they have to outlive its sleep.
        """
        return DISCARD if self.load_format == DUMMY else KEEP


def engine_args(settings: EngineSettings, on_cpu: bool) -> AsyncEngineArgs:
    """vLLM's arguments. On a GPU long prompts are cut into chunks that share an iteration with the other sequences."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    return AsyncEngineArgs(
        model=settings.model_path,
        dtype=settings.dtype,  # type: ignore[arg-type]  # vLLM refuses other values
        max_model_len=settings.max_model_len,
        enforce_eager=settings.is_eager(on_cpu),
        tensor_parallel_size=settings.tensor_parallel_size,
        # By default, an engine of several ranks inside a Ray placement group asks Ray for a bundle per rank.
        distributed_executor_backend="mp" if settings.tensor_parallel_size > 1 else None,
        seed=settings.seed,
        max_num_seqs=settings.max_num_seqs,
        # A prompt is never split on CPU, where splitting breaks a request's own random numbers.
        enable_chunked_prefill=not on_cpu,
        max_num_batched_tokens=max(
            settings.max_num_batched_tokens, settings.max_num_seqs, settings.max_model_len if on_cpu else 0
        ),
        enable_prefix_caching=True,
        logprobs_mode="processed_logprobs",
        load_format=settings.load_format,
        trust_remote_code=settings.trust_remote_code,
        enable_sleep_mode=settings.sleep_mode and not on_cpu,
        scheduler_cls="verl.rollout.turn_scheduler.turn_scheduler",
        worker_extension_cls="verl.rollout.weight_sync.WeightSyncExtension",
        disable_log_stats=True,
        use_tqdm_on_load=False,
        **device_args(on_cpu, settings.kv_cache_gib, settings.gpu_memory_utilization),
    )


def device_args(on_cpu: bool, kv_cache_gib: float, gpu_memory_utilization: float) -> dict[str, Any]:
    """Engine arguments that exist for only one kind of device."""
    if on_cpu:
        # 32 tokens a block, not the default 128: the turns of an episode share more of their prefix.
        return {"kv_cache_memory_bytes": int(kv_cache_gib * GIB), "block_size": 32}
    return {"gpu_memory_utilization": gpu_memory_utilization}


def engine_variables(settings: EngineSettings, on_cpu: bool) -> dict[str, str]:
    """Environment variables of the engine's process."""
    quiet = ENGINE_VARIABLES | (CPU_ENGINE_VARIABLES if on_cpu else {})
    variables = {name: value for name, value in quiet.items() if name not in os.environ}
    if settings.batch_invariant:
        variables["VLLM_BATCH_INVARIANT"] = "1"
    if not on_cpu:
        return variables
    threads = settings.num_threads or engine_threads()
    variables |= {
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",  # waiting threads sleep: the trainer takes turns with the engine on these cores
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "PYTHONWARNINGS": "ignore",
    }
    if settings.is_eager(on_cpu):
        variables["TORCHDYNAMO_DISABLE"] = "1"  # else one helper of the sampler is compiled, which takes seconds
    if settings.tensor_parallel_size == 1:
        # The model runs in the engine's own process. vLLM's default, a process of its own fed through a polled
        # ring buffer, takes twice the time for a small model and keeps a third of a core busy while idle.
        variables["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    return variables


def preload_variable(packages: Path, links: Path) -> dict[str, str]:
    """The variable LD_PRELOAD for packages in a folder with a space: links to the libraries that vLLM preloads on CPU.

    vLLM itself names them by their paths, and LD_PRELOAD is a list with spaces between its items.
    """
    if not {" ", ":"} & {*str(packages)}:
        return {}
    preloaded = []
    for pattern in ("vllm/libs/libtcmalloc_minimal*.so*", "torch/lib/libgomp*.so*", "torch.libs/libgomp*.so*"):
        for library in sorted(packages.glob(pattern))[:1]:
            link = links / library.name
            link.symlink_to(library)
            preloaded.append(str(link))
    return {"LD_PRELOAD": ":".join(preloaded)}


# Of a line of vLLM's: `(EngineCore pid=7) ERROR 11-26 19:25:51 [core.py:1510] `.
PREFIX = re.compile(r"^(\([\w ]+ pid=\d+\) )?((ERROR|INFO|WARNING) [\d-]+ [\d:.]+ \[[^\]]*\] ?)?")
CAUSE = re.compile(r"^[A-Za-z_][\w.]*(Error|Exception|Interrupt)\b(: .*)?$")
ELSEWHERE = re.compile(r"See (root cause|stack trace)|EngineDead", re.IGNORECASE)  # errors about another one
MOST = 300  # characters of one error


class EngineOutput:
    """What has been written to this process's standard output and error since, by it and by its children.

    Only where these are files, as for a worker of Ray; on a terminal people see it themselves.
    """

    def __init__(self) -> None:
        self._files = {path: path.stat().st_size for path in map(_file_behind, (1, 2)) if path}

    def explain(self, error: BaseException) -> str:
        """The first different errors that were printed, at most two, or else `error`, and where all of it is."""
        found: list[str] = []
        # Ray's logs may be gone: what cleans /tmp removes files that are some days old.
        files = {path: start for path, start in self._files.items() if path.is_file()}
        for path, start in files.items():
            with path.open("rb") as file:
                file.seek(start)
                printed = file.read().decode(errors="replace")
            for line in printed.splitlines():
                text = PREFIX.sub("", line).strip()
                if CAUSE.match(text) and not ELSEWHERE.search(text) and text[:MOST] not in found:
                    found.append(text[:MOST])
        where = " and ".join(str(path) for path, start in files.items() if path.stat().st_size > start)
        told = "; ".join(found[:2]) or " ".join(in_words(error).split())
        return f"vLLM says: {told}" + f" (all that it printed is in {where})" * bool(where)


def _file_behind(descriptor: int) -> Path | None:
    """The regular file that a descriptor writes to, if it has a name."""
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return None
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
    except OSError:
        return None
    return path if path.is_file() else None
