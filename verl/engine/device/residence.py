"""Which parts of a role are on its device in each phase: parameters, gradients and optimizer state move to host memory
and back, each by one call.

Only the local parts of sharded tensors (DTensors) move. The tensor objects stay the same, so that the optimizer and
FSDP2 notice nothing, and what is in host memory can be read, saved and written there as usual. Host memory is one block
for each group of tensors, pinned on CUDA and reused; copies are asynchronous and waited for once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from verl.config.sections.model import FrozenFsdpConfig, FsdpConfig
from verl.engine.device import torch_private
from verl.engine.device.memory import DeviceMemory, device_memory
from verl.engine.device.runtime import kind_of
from verl.phases import RESIDENT, Part, Phase

ALIGNMENT = 256  # bytes


class Slot(NamedTuple):
    """A contiguous tensor that can be moved: `put` replaces its memory by a [n] tensor with the same values."""

    flat: torch.Tensor
    put: Callable[[torch.Tensor], None]


Slots = Callable[[], Sequence[Slot]]


class Movable:
    """Tensors that move together. `slots` is called for every move: optimizer state comes and goes."""

    def __init__(self, slots: Slots, device: torch.device, memory: DeviceMemory) -> None:
        self._slots, self._device, self._memory = slots, device, memory
        self._host_block = torch.empty(0, dtype=torch.uint8)

    @torch.no_grad()
    def to_host(self) -> None:
        """Copy to host memory what is not there already, and release the device's memory."""
        slots = [slot for slot in self._slots() if slot.flat.numel()]
        if all(self._in_host_block(slot.flat) for slot in slots):
            return
        views = self._host_views([slot.flat for slot in slots])
        copies = [view.copy_(slot.flat, non_blocking=True) for slot, view in zip(slots, views, strict=True)]
        self._memory.wait()
        for slot, copy in zip(slots, copies, strict=True):
            slot.put(copy)

    @torch.no_grad()
    def to_device(self) -> None:
        """Copy all to the device; later work on the current stream finds the tensors there."""
        for slot in self._slots():
            if slot.flat.numel() and (slot.flat.device != self._device or self._in_host_block(slot.flat)):
                slot.put(torch.empty_like(slot.flat, device=self._device).copy_(slot.flat, non_blocking=True))

    @property
    def on_device(self) -> bool:
        """Whether any of them is on the device."""
        return any(slot.flat.numel() and not self._in_host_block(slot.flat) for slot in self._slots())

    def _in_host_block(self, flat: torch.Tensor) -> bool:
        return torch_private.share_storage(flat, self._host_block)

    def _host_views(self, flats: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Space in host memory for each tensor, in order."""
        sizes = [-(-flat.nbytes // ALIGNMENT) * ALIGNMENT for flat in flats]
        # A new block if this one is of another size, or if tensors that are in it would be written over.
        if self._host_block.nbytes != sum(sizes) or any(map(self._in_host_block, flats)):
            self._host_block = self._memory.host_block(sum(sizes))
        parts = self._host_block.split(sizes)
        return [part[: flat.nbytes].view(flat.dtype) for part, flat in zip(parts, flats, strict=True)]


class Residence:
    """The movable parts of a role. Outside of `during` all of them are in host memory."""

    def __init__(self, movable: Mapping[Part, Movable], memory: DeviceMemory) -> None:
        self._movable, self._memory = movable, memory

    @contextlib.contextmanager
    def during(self, phase: Phase, *parts: Part) -> Iterator[None]:
        """Move to the device what the phase needs (only `parts` of that, if given); `leave` afterwards."""
        wanted = RESIDENT[phase].intersection(parts) if parts else RESIDENT[phase]
        for part, movable in self._movable.items():
            if part in wanted:
                movable.to_device()
        try:
            yield
        finally:
            self.leave()

    def moves(self, part: Part) -> bool:
        """Whether the part is off-loaded at all."""
        return part in self._movable

    @property
    def on_device(self) -> set[Part]:
        """The movable parts that are on the device now."""
        return {part for part, movable in self._movable.items() if movable.on_device}

    def leave(self) -> None:
        """Move everything to host memory, and return free memory to the device, where others need it next."""
        for movable in self._movable.values():
            movable.to_host()
        self._memory.give_back()


def moves_on(device: torch.device) -> bool:
    """Whether host memory is separate from the device's."""
    return kind_of(device) == "cuda"


def residence(
    fsdp: FsdpConfig,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    anchor: tuple[FrozenFsdpConfig, nn.Module] | None = None,
) -> Residence:
    """The residence of a trained role, according to its `*_offload` keys."""
    memory = device_memory(device)
    slots: dict[Part, Slots] = {}
    # Functions, which find the tensors anew for each move: gradients and moments come and go.
    if fsdp.param_offload:
        slots[Part.PARAMETERS] = lambda: parameter_slots(model)
    if fsdp.grad_offload:
        slots[Part.GRADIENTS] = lambda: tensor_slots([p.grad for p in model.parameters()])
    if fsdp.optimizer_offload:
        slots[Part.OPTIMIZER] = lambda: tensor_slots([v for s in optimizer.state.values() for v in s.values()])
    if anchor is not None and anchor[0].param_offload:
        slots[Part.ANCHOR] = lambda: parameter_slots(anchor[1])
    moved = {part: Movable(of, device, memory) for part, of in slots.items()} if moves_on(device) else {}
    return Residence(moved, memory)


def parameter_slots(model: nn.Module) -> list[Slot]:
    """The shards of a model, each with the padding that FSDP2 keeps at its end."""
    return [
        Slot(torch_private.padded_shard(parameter), partial(torch_private.replace_padded_shard, parameter))
        for parameter in torch_private.fsdp_parameters(model)
    ]


def tensor_slots(tensors: Sequence[object]) -> list[Slot]:
    """Slots of the local parts of those `tensors` that are DTensors."""
    return [_tensor_slot(tensor) for tensor in tensors if isinstance(tensor, DTensor)]


def _tensor_slot(tensor: DTensor) -> Slot:
    part = torch_private.local_part(tensor)
    shape = part.shape

    def put(flat: torch.Tensor) -> None:
        torch_private.replace_local_part(tensor, flat.view(shape))

    return Slot(part.reshape(-1), put)
