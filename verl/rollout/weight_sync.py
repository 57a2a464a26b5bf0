"""The sampler's side of weight sync: runs inside the engine's worker process and loads what the trainer published."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch

from verl.heap import return_free_memory
from verl.rollout.weight_file import checksum, read_weights
from verl.rollout.weight_ipc import bit_sum, open_exports
from verl.stacks import offer_stacks

__all__ = ["WeightSyncExtension", "checksum"]

PR_SET_PDEATHSIG = 1  # from linux/prctl.h


class WeightSyncExtension:
    """Methods that vLLM adds to its worker class (`worker_extension_cls`) and that the engine calls by name.

    The attributes are the worker's own.
    """

    model_runner: Any
    vllm_config: Any
    device: torch.device
    init_weight_transfer_engine: Callable[[dict[str, Any]], None]
    start_weight_update: Callable[[], None]
    update_weights: Callable[[dict[str, Any]], None]
    finish_weight_update: Callable[[], None]

    def load_published_weights(self, path: str, expected: str) -> str:
        """Load the file at `path` in place and return the checksum of the tensors as they were read here.

        When that is not `expected`, nothing is loaded. `reload_weights` undoes and repeats what the engine did to
        its weights when it started (packing for the CPU kernels, fusing, casting), which `load_weights` alone does not.
        """
        from vllm.config import set_current_vllm_config

        weights = dict(read_weights(path))
        found = checksum(weights.items())
        if found == expected:
            with set_current_vllm_config(self.vllm_config):
                self.model_runner.reload_weights(weights_iterator=iter(weights.items()))
                _repack_output_heads(self.model_runner.get_model())
        del weights
        return_free_memory()
        return found

    def load_exported_weights(self, exports: dict[str, bytes], expected: str, index: int, count: int) -> str:
        """Load bucket `index` that the trainer exported on this GPU and return its checksum, computed on the GPU.

        When that is not `expected`, nothing is loaded. vLLM's "ipc" weight transfer opens the same memory again and
        copies from it; it has no hook for a look at the tensors before they are fused into the model's. Of a layer
        whose parts are in two buckets it keeps the first ones open, and PyTorch keeps memory that is open elsewhere.
        """
        tensors, update = open_exports(exports, self.device)
        found = checksum(tensors.items(), bit_sum)
        del tensors
        if found != expected:
            return found
        if index == 0:
            self.init_weight_transfer_engine({"packed": False})
            self.start_weight_update()
        self.update_weights(update)
        if index + 1 == count:
            self.finish_weight_update()
        return found

    def join_run(self, owner: int) -> None:
        """Let this process end when the one that started it ends, however that happens; offer stacks.

        Of several ranks that one is the engine's process, which itself outlives its owner, the process `owner`.
        """
        offer_stacks()
        if sys.platform == "linux":
            ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if (engine := os.getppid()) != owner:
                threading.Thread(target=end_with, args=(engine, owner), daemon=True).start()


def end_with(engine: int, owner: int) -> None:
    """Wait until the process `owner` has ended, and kill the process `engine`."""
    with contextlib.suppress(ProcessLookupError):
        ended = select.poll()
        ended.register(os.pidfd_open(owner), select.POLLIN)
        ended.poll()
    with contextlib.suppress(ProcessLookupError):
        os.kill(engine, signal.SIGKILL)


def _repack_output_heads(model: torch.nn.Module) -> None:
    """Make the output head read its current weight on CPU.

    The CPU kernels keep a packed copy of it. `reload_weights` renews that copy only for layers that appear in the
    weights by name, which a head tied to the embedding does not: it would go on with the old weights, silently.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod

    for layer in model.modules():
        if isinstance(layer, ParallelLMHead) and isinstance(layer.quant_method, UnquantizedEmbeddingMethod):
            layer.quant_method.process_weights_after_loading(layer)
