"""The sampler's side of weight sync: runs inside the engine's worker process and loads what the trainer exported."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from verl.engine.files.checksum import NamedTensors, differing, sums_of
from verl.errors import WeightSyncError
from verl.process.ranks import end_with_parent
from verl.process.startup import RETURN_EVERY_S, collect_rarely, keep_freed_memory, return_free_memory
from verl.process.watchdog import offer_stacks
from verl.rollout.seed_draws import draw_ahead
from verl.weight_sync.export import are_adapters, with_adapters
from verl.weight_sync.group import RECEIVED, Rendezvous, WeightReceiver
from verl.weight_sync.ipc import device_name, open_exports
from verl.weight_sync.memory import host_name, open_shared


class WeightSyncExtension:
    """Methods that vLLM adds to its worker class (`worker_extension_cls`) and that the engine calls by name.

    The attributes are the worker's own.
    """

    model_runner: Any
    vllm_config: Any
    device: torch.device
    rank: int
    weight_receiver: WeightReceiver | None = None
    _replaced = False  # a whole version has been loaded
    _replacement: Replacement | None = None
    _adapters: dict[str, torch.Tensor]

    def load_bucket(self, exports: dict[str, bytes], sums: dict[str, int], index: int, count: int) -> list[str]:
        """Load bucket `index` of `count`, in order. Returns what is wrong with it; then none of it is loaded.

        vLLM's layer-wise reload undoes and repeats what the engine did to its weights at start (taking this rank's
        part, packing for the CPU kernels, fusing, casting), layer by layer, once a layer's weights are complete. It
        writes to the memory that the weights have, as CUDA graphs require.

        The first version of an engine that was started without weights must replace all that it has; the last bucket's
        answer names what it did not.
        """
        try:
            tensors = (
                self._receiver.take(exports[RECEIVED]) if RECEIVED in exports else open_weights(exports, self.device)
            )
        except WeightSyncError as error:
            return [str(error)]
        if wrong := differing(sums_of(tensors.items()), sums):
            return [f"other values in {name} than the trainer wrote" for name in wrong]
        if are_adapters(tensors):
            # Copied until all of a version are there, since the bucket's memory is reused.
            if index == 0:
                self._adapters = {}
            self._adapters |= {name: tensor.to(self.device, copy=True) for name, tensor in tensors.items()}
            if index + 1 == count:
                return self._reload(with_adapters(self._files(), self._adapters), 0, 1)
            return []
        return self._reload(tensors.items(), index, count)

    def join_weight_group(self, host: str, port: int, size: int, first_rank: int) -> str:
        """Take part in broadcasts of weights, as member `first_rank` + this rank of the engine.

        Returns what went wrong; empty if nothing did, here and below.
        """
        from vllm.utils.nccl import unpinned_nccl_env

        # vLLM's settings for batch invariance are for its own groups; the trainer does not have them.
        with unpinned_nccl_env():
            return failure_of(lambda: self._receiver.join(Rendezvous(host, port, size), first_rank + self.rank))

    def receive_bucket(self, packed: bytes, ticket: bytes) -> str:
        """Receive a bucket, for a later `load_bucket` with this ticket among the exports."""
        return failure_of(lambda: self._receiver.receive(packed, ticket))

    def leave_weight_group(self) -> str:
        return failure_of(self._receiver.leave)

    @property
    def _receiver(self) -> WeightReceiver:
        if self.weight_receiver is None:
            self.weight_receiver = WeightReceiver(self.device)
        return self.weight_receiver

    def join_run(self, owner: int) -> None:
        """End this process when the process that started it ends, however that happens; offer stacks.

        With several ranks, that is the engine's process, which itself would outlive its owner, the process `owner`.
        """
        offer_stacks()
        if sys.platform == "linux":
            end_with_parent()
            if (engine := os.getppid()) != owner:
                threading.Thread(target=end_with, args=(engine, owner), daemon=True).start()

    def attention_backends(self) -> list[str]:
        """The attention backends of the model's layers, as vLLM names them, each once."""
        from vllm.config import get_layers_from_vllm_config
        from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

        layers = get_layers_from_vllm_config(self.vllm_config, AttentionLayerBase)
        return sorted({layer.get_attn_backend().get_name() for layer in layers.values()})

    def speed_up_cpu(self) -> None:
        """Have the sampler use `verl.rollout.seed_draws`, and the process its memory as `verl.process.startup` says."""
        keep_freed_memory()
        collect_rarely()
        draw_ahead(self.model_runner.sampler.topk_topp_sampler)

    def _files(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights in the model's files, whatever the engine was started with."""
        from vllm.config import LoadConfig
        from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

        config = self.vllm_config.load_config
        files = LoadConfig(download_dir=config.download_dir, ignore_patterns=config.ignore_patterns)
        files.use_tqdm_on_load = False
        loader = DefaultModelLoader(files)
        yield from loader.get_all_weights(self.vllm_config.model_config, self.model_runner.get_model())

    def _reload(self, named: NamedTensors, index: int, count: int) -> list[str]:
        """Returns what the version lacks, after its last bucket."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        # The first version of an engine that read no weights has to replace all of them.
        model = self.model_runner.get_model()
        if index == 0 and not self._replaced and self.vllm_config.load_config.load_format == "dummy":
            self._replacement = Replacement(model)
        replacement = self._replacement
        with (
            set_current_vllm_config(self.vllm_config),
            disable_mtp_completeness_check(),
            nan_in_new_memory() if replacement else contextlib.nullcontext(),
        ):
            # Layers are loaded bucket by bucket. What waits for parts of a later bucket is kept until then.
            if index == 0:
                initialize_layerwise_reload(model)
            loaded = model.load_weights(iter(named))
            if replacement:
                replacement.note(loaded)
            if index + 1 < count:
                keep_what_waits(model, dict(named))
            else:
                finalize_layerwise_reload(model, self.vllm_config.model_config)
                if self.device.type == "cpu":
                    _repack(model)
                self.model_runner.reset_lora_state()
        # The bucket is no longer used.
        if self.device.type == "cpu":
            return_free_memory(RETURN_EVERY_S)
        else:
            torch.accelerator.synchronize(self.device)  # the trainer reuses the bucket's memory next
        if index + 1 < count:
            return []
        lacking = replacement.lacking(model) if replacement else []
        self._replaced, self._replacement = not lacking, None
        return lacking


class Replacement:
    """Shows whether a version of weights replaces all values of a model, which until then are random.

    All of them become NaN, which no trainer sends. After the version is loaded, what still has one was not replaced,
    or only in part. And vLLM names the parameters that it has loaded: on CPU, the kernels have packed copies.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._parameters = {name for name, _ in model.named_parameters()}
        self._loaded: set[str] | None = set()
        for _, tensor in _saved_values(model):
            tensor.fill_(torch.nan)

    def note(self, loaded: set[str] | None) -> None:
        """Note what `load_weights` of the model has loaded; None where it does not say."""
        self._loaded = None if self._loaded is None or loaded is None else self._loaded | loaded

    def lacking(self, model: torch.nn.Module) -> list[str]:
        """The names of what was not replaced, each with what to do."""
        names = set() if self._loaded is None else self._parameters - self._loaded
        names |= {name for name, tensor in _saved_values(model) if torch.aminmax(tensor).min.isnan()}
        return [
            f"no values for {name}, which the trainer does not send, or only in part: set "
            "actor_rollout_ref.rollout.load_format=auto, so that the engine keeps what the model's files have"
            for name in sorted(names)
        ]


def _saved_values(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """What a model saves in floating point, each once: parameters, and buffers that are not computed."""
    seen: set[int] = set()
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point() and tensor.numel() and tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            yield name, tensor


@contextlib.contextmanager
def nan_in_new_memory() -> Iterator[None]:
    """Inside, memory that torch does not initialize has NaN: vLLM makes a layer anew, and then loads its weights."""
    was_on, only_warned = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of operations that are not deterministic
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(was_on, warn_only=only_warned)


def open_weights(exports: Mapping[str, bytes], device: torch.device) -> dict[str, torch.Tensor]:
    """The weights of a bucket, on `device` or else in this host's shared memory.

    They are the trainer's memory. Raises `WeightSyncError` when the trainer has exported to neither of the two.
    """
    if (gpu := device_name(device)) in exports:
        return open_exports(exports[gpu], device)
    if (host := host_name()) in exports:
        return open_shared(exports[host])
    raise WeightSyncError(
        f"the trainer exported no weights on the engine's device {gpu} or its {host}, only on {', '.join(exports)}; "
        "engines must be on the trainer's GPUs, or at least on its hosts"
    )


def keep_what_waits(model: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy what is not yet loaded of a bucket: parts of layers whose other parts come in a later bucket.

    vLLM keeps such tensors until the layer is complete, but the bucket's memory is reused before that.
    """
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    in_bucket = {tensor.untyped_storage().data_ptr() for tensor in tensors.values()} - {0}  # 0: of meta tensors
    for layer in model.modules():
        for _, call in get_layerwise_info(layer).loaded_weights:
            for name, value in call.arguments.items():
                if isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() in in_bucket:
                    call.arguments[name] = value.clone()


def failure_of(call: Callable[[], None]) -> str:
    try:
        call()
    except WeightSyncError as error:
        return str(error)
    return ""


def end_with(engine: int, owner: int) -> None:
    """Wait until the process `owner` has ended, and kill the process `engine`."""
    with contextlib.suppress(ProcessLookupError):
        ended = select.poll()
        ended.register(os.pidfd_open(owner), select.POLLIN)
        ended.poll()
    with contextlib.suppress(ProcessLookupError):
        os.kill(engine, signal.SIGKILL)


def _repack(model: torch.nn.Module) -> None:
    """Make output heads and experts read their current weights on CPU.

    The CPU kernels read packed copies. A reload renews that of a head only if the head appears in the weights by name,
    which one tied to the embedding does not: it would silently keep using the old weights. And it packs experts only
    when their kernel is made, at the start: the kernel would read unpacked weights as packed ones.
    """
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod

    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if isinstance(layer, ParallelLMHead) and isinstance(method, UnquantizedEmbeddingMethod):
            method.process_weights_after_loading(layer)
        elif isinstance(method, UnquantizedFusedMoEMethod) and method.moe_kernel is not None:
            method.moe_kernel.fused_experts.process_weights_after_loading(layer)
