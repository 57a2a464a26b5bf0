"""Additive checksums of weights: each rank sums its own values, an engine those that it received.

They are sums of 64-bit words, so they cost one pass at the speed of memory on CPU and GPU alike, and the sums of the
parts of a weight add up to the sum of the whole weight.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import pairwise

import torch

from verl.errors import NumericalError

NamedTensors = Iterable[tuple[str, torch.Tensor]]
Sums = Mapping[str, int]

WORD = 8  # bytes
BLOCK = 4096  # bytes whose words have the same factor
CHUNK = 2**20  # bytes that are copied and then summed
MODULUS = 2**64


def word_sum(tensor: torch.Tensor, first_byte: int = 0) -> int:
    """Sum over blocks i of (2i + 1) times the block's words, modulo 2^64, computed on the tensor's device.

    The tensor's bytes are those of a weight from `first_byte` on; a block is 4096 bytes of the weight, a word 8 of them
    as an integer. One changed bit changes the sum (an odd factor loses none), and so do values that moved to another
    block; words that changed places within a block do not.
    """
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    ends = (0, *_whole_blocks(len(data), first_byte), len(data))
    total = 0
    for begin, end in pairwise(ends):
        if begin < end:
            total += _sum_of_blocks(data[begin:end], first_byte + begin)
    return total % MODULUS


def key_of(name: str, dtype: torch.dtype, shape: Iterable[int]) -> str:
    """A weight's key in `Sums`, with its format, since a sum does not depend on that."""
    return f"{name} {str(dtype).removeprefix('torch.')} {list(shape)}"


def sums_of(named_tensors: NamedTensors) -> dict[str, int]:
    """The sums of whole weights."""
    return {key_of(name, tensor.dtype, tensor.shape): word_sum(tensor) for name, tensor in named_tensors}


def added(parts: Iterable[Sums]) -> dict[str, int]:
    """The sums of whole weights from those of their parts."""
    total: dict[str, int] = {}
    for part in parts:
        for key, value in part.items():
            total[key] = (total.get(key, 0) + value) % MODULUS
    return total


def differing(found: Sums, expected: Sums) -> list[str]:
    """Keys whose sums differ, or are in only one of the two."""
    return [key for key in {**expected, **found} if found.get(key) != expected.get(key)]


def require_finite(name: str, tensor: torch.Tensor) -> None:
    """Raise `NumericalError` for a NaN or an Inf, from which an engine would sample nonsense."""
    if tensor.is_floating_point() and tensor.numel():
        _require_finite(name, tensor, tensor.sum())


def copy_checked(name: str, values: torch.Tensor, target: torch.Tensor, first_byte: int) -> int:
    """Copy flat `values` to `target`, in its number format, and return `word_sum(target, first_byte)`.

    The same in one pass: each part is summed while the processor's cache has it. Raises like `require_finite`.
    """
    begin, end = _whole_blocks(target.nbytes, first_byte)
    begin, end = begin // target.itemsize, end // target.itemsize
    target[:begin].copy_(values[:begin])
    target[end:].copy_(values[end:])
    for part in (target[:begin], target[end:]):
        require_finite(name, part)
    first = first_byte + begin * target.itemsize
    total = word_sum(target[:begin], first_byte) + word_sum(target[end:], first_byte + end * target.itemsize)
    return (total + _copy_blocks(name, values[begin:end], target[begin:end], first // BLOCK)) % MODULUS


def _copy_blocks(name: str, values: torch.Tensor, target: torch.Tensor, first_block: int) -> int:
    if not len(target):
        return 0
    if (values.device.type, values.dtype, target.dtype) == ("cpu", torch.float32, torch.bfloat16):
        from verl.engine.files.cast import round_to_bfloat16  # importing numba takes half a second

        sum_of_all, finite = round_to_bfloat16(values, target, first_block)
        if not finite:
            raise _not_finite(name)
        return sum_of_all
    # Chunk by chunk, so that both sums read what the copy has just left in the cache.
    words = target.view(torch.int64).view(-1, BLOCK // WORD)
    sums = torch.empty(len(words), dtype=torch.int64)
    size = CHUNK // target.itemsize
    totals = torch.zeros(-(-len(target) // size), dtype=target.dtype)
    parts = (target.split(size), values.split(size), words.split(CHUNK // BLOCK), sums.split(CHUNK // BLOCK))
    for chunk, source, its_words, its_sums, total in zip(*parts, totals.unbind(), strict=True):
        chunk.copy_(source)
        torch.sum(its_words, dim=1, out=its_sums)
        if chunk.is_floating_point():
            torch.sum(chunk, dim=0, out=total)
    # A NaN or an Inf makes the sum of its chunk NaN or Inf, too.
    if target.is_floating_point():
        _require_finite(name, target, totals.abs().max())
    return _weighted(sums, first_block)


def _require_finite(name: str, tensor: torch.Tensor, total: torch.Tensor) -> None:
    """`total`: the sum of all values, which is fast. If it is finite, they all are; if not, it may just be too large.

    Then minimum and maximum decide: they are NaN if there is one. `isfinite` takes 100 times as long.
    """
    if not math.isfinite(total) and not all(math.isfinite(extreme) for extreme in torch.aminmax(tensor)):
        raise _not_finite(name)


def _not_finite(name: str) -> NumericalError:
    return NumericalError(f"weight {name} has NaN or Inf values; it is not sent to the rollout engines")


def _whole_blocks(num_bytes: int, first_byte: int) -> tuple[int, int]:
    """The begin and the end of the whole blocks in the bytes from `first_byte` on."""
    begin = min(num_bytes, -first_byte % BLOCK)
    return begin, begin + (num_bytes - begin) // BLOCK * BLOCK


def _sum_of_blocks(data: torch.Tensor, first_byte: int) -> int:
    """The weighted sum of whole blocks, or of a part of one."""
    block, begin = divmod(first_byte, BLOCK)
    if len(data) % BLOCK:  # padded with zeros: the two parts of a split word add up to the word
        whole = data.new_zeros(BLOCK)
        whole[begin : begin + len(data)] = data
        data = whole
    elif data.storage_offset() % WORD:
        data = data.clone()
    return _weighted(data.view(torch.int64).view(-1, BLOCK // WORD).sum(dim=1), block)


def _weighted(sums: torch.Tensor, first_block: int) -> int:
    factors = torch.arange(2 * first_block + 1, 2 * (first_block + len(sums)) + 1, 2, device=sums.device)
    return int((sums * factors).sum())
