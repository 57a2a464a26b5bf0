"""The checksum of weights on their way: worked out by hand, added up from parts, changed by what may go wrong."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl.engine.files import checksum as weight_checksum
from verl.engine.files.checksum import (
    BLOCK,
    added,
    copy_checked,
    differing,
    key_of,
    require_finite,
    sums_of,
    word_sum,
)
from verl.errors import NumericalError

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64, torch.bool]


def test_by_hand() -> None:
    # bfloat16 keeps the upper half of a float32: 1.0 is 0x3F80, 2.0 is 0x4000. Four of them are a word.
    row = torch.tensor([1.0, 2.0, 2.0, 1.0], dtype=torch.bfloat16)
    word = 0x3F80_4000_4000_3F80
    assert word_sum(row) == word
    assert word_sum(row[:3]) == word - (0x3F80 << 48)
    assert word_sum(torch.tensor(1.0)) == 0x3F800000
    blocks = row.repeat(BLOCK // 8 + 1)  # a block of 512 words, and one word of the next
    assert word_sum(blocks) == (512 * 1 * word + 3 * word) % 2**64
    assert word_sum(torch.empty(0)) == 0


@given(st.integers(1, 3 * BLOCK), st.lists(st.integers(0, 3 * BLOCK), max_size=4))
def test_parts_add_up_wherever_they_are_cut(num_bytes: int, cuts: list[int]) -> None:
    whole = torch.randint(256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(num_bytes))
    ends = [0, *sorted(min(cut, num_bytes) for cut in cuts), num_bytes]
    parts = [{"w": word_sum(whole[begin:end], begin)} for begin, end in zip(ends, ends[1:], strict=False)]
    assert added(parts) == {"w": word_sum(whole)}


@given(st.sampled_from(DTYPES[:4]), st.integers(0, 2000 - 1), st.data())
def test_one_changed_bit_changes_the_sum(dtype: torch.dtype, position: int, data: st.DataObject) -> None:
    weight = torch.randn(400, 5, generator=torch.Generator().manual_seed(1)).to(dtype)
    changed = weight.clone()
    bits = changed.view(-1).view(torch.uint8)
    bits[position * dtype.itemsize + data.draw(st.integers(0, dtype.itemsize - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert differing(sums_of([("w", changed)]), sums_of([("w", weight)]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_of_moved_values(dtype: torch.dtype) -> None:
    weight = (torch.arange(2 * 3 * BLOCK).reshape(2, -1) % 7).to(dtype)
    expected = sums_of([("w", weight)])
    assert sums_of([("w", weight.t().contiguous().t())]) == expected  # the same values in another layout
    changed = ("w", weight.flip(0)), ("w", weight.roll(BLOCK, 1)), ("w", weight.reshape(3, -1)), ("v", weight)
    for named in changed:
        assert differing(sums_of([named]), expected)


@given(st.integers(0, 5000), st.integers(0, 3000), st.sampled_from(DTYPES))
def test_a_checked_copy_casts_and_has_the_sum_of_what_was_copied(first: int, length: int, dtype: torch.dtype) -> None:
    """Into any part of a weight, in chunks of two blocks."""
    values = torch.arange(length, dtype=torch.float32) % 7
    memory = torch.zeros(8192, dtype=dtype)
    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(weight_checksum, "CHUNK", 2 * BLOCK)
        found = copy_checked("w", values, memory[first : first + length], first * memory.itemsize)
    assert torch.equal(memory[first : first + length], values.to(dtype))
    assert memory[:first].sum() == memory[first + length :].sum() == 0
    assert found == word_sum(memory[first : first + length], first * memory.itemsize)


def test_a_checked_copy_rounds_to_bfloat16_as_pytorch_does() -> None:
    """Bit patterns from all over float32: subnormal numbers, ties, both zeros, the largest that stays finite."""
    values = torch.arange(-(2**31), 2**31, 7919, dtype=torch.int64).to(torch.int32).view(torch.float32)
    ties = torch.tensor([1.00390625, 1.01171875, -0.0, 3.3895313892515355e38])  # two ties: to 1.0 and to 1.015625
    values = torch.cat([ties, values[values.isfinite() & (values.abs() < 3.3895e38)]])
    target = torch.empty_like(values, dtype=torch.bfloat16)
    found = copy_checked("w", values, target, 0)
    assert target[:4].tolist() == [1.0, 1.015625, 0.0, 3.3895313892515355e38]
    assert torch.equal(target.view(torch.int16), values.to(torch.bfloat16).view(torch.int16))
    assert found == word_sum(target)


@pytest.mark.parametrize("position", [0, 2047, 2048, 5000])
def test_a_value_that_is_finite_in_float32_only_is_refused(position: int) -> None:
    values = torch.ones(5001)
    values[position] = 3.4e38
    with pytest.raises(NumericalError, match="weight w has NaN or Inf"):
        copy_checked("w", values, torch.empty(5001, dtype=torch.bfloat16), 0)


def test_what_differs_is_named() -> None:
    ones, twos = torch.ones(2), torch.full((3, 1), 2.0).bfloat16()
    expected = sums_of([("a", ones), ("b", twos)])
    assert list(expected) == [key_of("a", torch.float32, [2]), "b bfloat16 [3, 1]"]
    assert differing(sums_of([("b", twos), ("a", ones)]), expected) == []
    assert differing(sums_of([("a", 2 * ones), ("b", twos)]), expected) == ["a float32 [2]"]
    assert differing(sums_of([("a", ones)]), expected) == ["b bfloat16 [3, 1]"]
    assert differing(expected, sums_of([("a", ones)])) == ["b bfloat16 [3, 1]"]


@given(
    st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    st.integers(0, 299),
    st.sampled_from([float("nan"), float("inf"), -float("inf")]),
)
def test_a_value_that_is_not_finite_is_found_wherever_it_is(dtype: torch.dtype, position: int, value: float) -> None:
    weight = torch.randn(300, generator=torch.Generator().manual_seed(2)).to(dtype)
    require_finite("w", weight)
    weight = weight.repeat_interleave(50)
    require_finite("w", torch.full((300,), 60000.0).to(dtype))  # in float16, their sum is too large
    weight[50 * position] = value
    with pytest.raises(NumericalError, match="weight w has NaN or Inf"):
        require_finite("w", weight)
    with pytest.raises(NumericalError, match="weight w has NaN or Inf"):
        copy_checked("w", weight.float(), torch.empty_like(weight), 0)
