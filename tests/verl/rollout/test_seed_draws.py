"""Random numbers that are drawn ahead are those that vLLM's sampler would have drawn."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from verl.rollout.seed_draws import BLOCK, SeedDraws, draw_ahead

ROWS, WORDS = 6, 40


@given(seed=st.integers(0, 2**63 - 1))
def test_a_generator_gives_the_same_numbers_in_blocks(seed: int) -> None:
    alone, ahead, draws = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(seed), SeedDraws()
    for _ in range(2 * BLOCK + 3):
        assert draws.next(ahead) == torch.randint(0, 2**31, (1,), generator=alone).item()


def test_a_number_is_a_generator_s_own_whoever_else_draws() -> None:
    one, other = (torch.Generator().manual_seed(7) for _ in range(2))
    draws = SeedDraws()
    first = [draws.next(one) for _ in range(3)]
    assert [draws.next(other) for _ in range(3)] == first and draws.next(one) not in first


def test_the_sampler_gives_the_same_tokens_and_log_probs_to_the_bit() -> None:
    """Over steps in which requests come and go, one has no generator, and some steps have top-k and top-p."""
    from vllm.platforms import current_platform
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

    current_platform.import_kernels()

    def generators() -> list[torch.Generator]:
        return [torch.Generator().manual_seed(seed) for seed in range(3 * ROWS)]

    theirs, ours = TopKTopPSampler("processed_logprobs"), TopKTopPSampler("processed_logprobs")
    draw_ahead(ours)
    assert ours.forward != ours.forward_cpu
    seen, drawn = generators(), generators()
    values = torch.Generator().manual_seed(1)
    for step in range(3 * BLOCK):
        logits = torch.randn(ROWS, WORDS, generator=values)
        first = step // 4  # a request ends every four steps, and another comes
        rows = [row for row in range(ROWS) if row != step % 5]
        cut = (torch.full((ROWS,), 9), torch.full((ROWS,), 0.8)) if step % 3 == 0 else (None, None)
        found = []
        for sampler, own in ((theirs, seen), (ours, drawn)):
            torch.manual_seed(step)  # for the row without a generator
            place = {row: own[(first + row) % len(own)] for row in rows}
            found.append(sampler.forward(logits.clone(), place, *cut))
        (ids, log_probs), (same_ids, same_log_probs) = found
        assert torch.equal(ids, same_ids) and torch.equal(log_probs, same_log_probs)


def test_another_sampler_is_left_alone() -> None:
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

    raw = TopKTopPSampler("raw_logprobs")
    draw_ahead(raw)
    assert raw.forward == raw.forward_cpu
