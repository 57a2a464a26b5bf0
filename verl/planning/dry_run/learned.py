"""The outputs of operations by the shapes of their inputs: PyTorch computes the first of a kind, others are looked up.

PyTorch's fake tensors have such a table too, but its keys and outputs take several times as long, and a model is tens
of thousands of operations of a few hundred kinds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from verl.planning.dry_run.torch_private import (
    UNSAFE_VIEW,
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    changes_an_input,
    storage_id,
)

CPU = torch.device("cpu")
AS_STRIDED = torch.ops.aten.as_strided.default  # its arguments say where it is in the storage, not in its input
CHANGES_SHAPE = (torch.ops.aten.set_, torch.ops.aten.resize_, torch.ops.aten.resize_as_)
OF_VALUES = {torch.Tag.inplace_view, torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


@dataclass(frozen=True)
class Output:
    """How to make one tensor of an output: the input number `same` itself, a view of the input number `view`, or a new
    tensor.

    A view's `offset` is counted from its input's, in bytes.
    """

    same: int | None
    view: int | None = None
    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    offset: int = 0
    dtype: torch.dtype = torch.float32

    def make(self, mode: FakeTensorMode, inputs: Sequence[FakeTensor]) -> FakeTensor:
        """Make the tensor for these inputs."""
        if self.same is not None:
            return inputs[self.same]
        meta = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")
        if self.view is not None:
            seen = inputs[self.view]
            offset = (_start(seen) + self.offset) // self.dtype.itemsize
            meta.set_(seen.untyped_storage(), offset, self.shape, self.stride)
        return FakeTensor(mode, meta, CPU)


@dataclass(frozen=True)
class LearnedOutput:
    """How to make the output of an operation. `container`: None for a single tensor, else list or tuple. `what`: the
    caller's note on the first such operation.
    """

    outputs: tuple[Output, ...]
    container: type[list[Any]] | type[tuple[Any, ...]] | None
    what: Any

    def make(self, mode: FakeTensorMode, inputs: Sequence[FakeTensor]) -> Any:
        made = [output.make(mode, inputs) for output in self.outputs]
        return made[0] if self.container is None else self.container(made)


class UnknownInputError(Exception):
    """An input for which no output can be looked up."""


class Learned:
    """The outputs that were learned, by operation and inputs. All devices of the process share them: they are
    shapes, whatever run they were learned in.
    """

    _outputs: ClassVar[dict[Any, LearnedOutput | None]] = {}

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._takes_host = False  # whether the operation that is looked at may have tensors of the host beside

    def key(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, list[FakeTensor]] | None:
        """The operation's key, and its tensors in order; None if the output may depend on more than that."""
        tensors: list[FakeTensor] = []
        # Tensors of the host have real values. An operation that may change one has to run, and is not looked up.
        self._takes_host = isinstance(func, OpOverload) and not changes_an_input(func)
        try:
            parts = [self._part(value, tensors) for value in args]
            parts += [(name, self._part(kwargs[name], tensors)) for name in kwargs]
        except UnknownInputError:
            return None
        if not tensors:
            return None
        if func is AS_STRIDED:
            parts.append(tensors[0].storage_offset())
        return (func, *parts), tensors

    def look_up(self, key: Any) -> LearnedOutput | None:
        return self._outputs.get(key)

    def learn(self, key: Any, func: Any, inputs: Sequence[FakeTensor], out: Any, what: Any) -> None:
        """Remember `out`, if later outputs can be made like it."""
        if key in self._outputs:
            return
        self._outputs[key] = None
        container = type(out) if isinstance(out, list | tuple) else None
        if container not in (None, list, tuple) or not _is_plain(func):
            return
        leaves = list(out) if isinstance(out, list | tuple) else [out]
        outputs = [_output(func, leaf, inputs, self._mode) for leaf in leaves]
        found = tuple(output for output in outputs if output is not None)
        if found and len(found) == len(outputs):
            self._outputs[key] = LearnedOutput(found, container, what)

    def _part(self, value: Any, tensors: list[FakeTensor]) -> Any:
        if type(value) is torch.Tensor and self._takes_host:
            return CPU, value.shape, value.stride(), value.dtype
        if isinstance(value, torch.Tensor):
            if not (isinstance(value, FakeTensor) and value.fake_mode is self._mode) or value.fake_device != CPU:
                raise UnknownInputError
            tensors.append(value)
            return value.shape, value.stride(), value.dtype
        if isinstance(value, list | tuple):
            return tuple(self._part(part, tensors) for part in value)
        if value is None or isinstance(value, _PLAIN):
            return type(value), value
        raise UnknownInputError


_PLAIN = (bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


def _is_plain(func: Any) -> bool:
    """Whether shapes say everything, and the inputs keep theirs."""
    if not isinstance(func, OpOverload) or func.overloadpacket in CHANGES_SHAPE:
        return False
    return not OF_VALUES.intersection(func.tags)


def _output(func: Any, leaf: Any, inputs: Sequence[FakeTensor], mode: FakeTensorMode) -> Output | None:
    """How to make a tensor of the output again; None: unknown."""
    if not (isinstance(leaf, FakeTensor) and leaf.fake_mode is mode) or leaf.fake_device != CPU:
        return None
    # An input that is returned, as by operations in place.
    for number, tensor in enumerate(inputs):
        if leaf is tensor:
            return Output(same=number)
    # A tensor in an input's storage can be made again if the operation always returns a view.
    shape, stride, storage = tuple(leaf.shape), leaf.stride(), leaf.untyped_storage()
    own = storage_id(storage)
    owner = [number for number, tensor in enumerate(inputs) if storage_id(tensor.untyped_storage()) == own]
    if owner:
        view = Output(None, owner[0], shape, stride, _start(leaf) - _start(inputs[owner[0]]), leaf.dtype)
        return view if func.is_view or func is UNSAFE_VIEW else None
    # A new tensor can be made again if it fills its storage: one of this shape and stride takes as many bytes.
    last = sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) + 1 if leaf.numel() else 0
    fills = leaf.storage_offset() == 0 and storage.nbytes() == last * leaf.element_size()
    return Output(None, None, shape, stride, 0, leaf.dtype) if fills else None


def _start(tensor: torch.Tensor) -> int:
    """The number of bytes of a tensor's storage that lie before it."""
    return int(tensor.storage_offset()) * tensor.element_size()
