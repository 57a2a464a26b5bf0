"""Prompts that rows share: what is computed of them, and that nothing else changes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_cases import CPU, make_batch, make_engine, relative_error
from engine_state import gradients
from test_varlen import FAMILIES, defined, kernel_by_definition, log_probs_and_gradient, tiny

from verl.engine import varlen
from verl.engine.batching import Layout, PackedRows, model_input
from verl.engine.micro_batches import Budget, plan, plan_all, rows_of_ranks
from verl.engine.model import CausalModel, layout_of
from verl.protocol import TrainBatch

SHARED = Layout(packed=True, share_prefixes=True)
GROUPER = "actor_rollout_ref.actor.use_prefix_grouper"


def batch_of(*rows: tuple[list[int], list[int]]) -> TrainBatch:
    """Rows of (prompt, answer)."""
    return TrainBatch(
        torch.tensor([len(prompt) + len(answer) for prompt, answer in rows]),
        {
            "ids": torch.tensor([token for prompt, answer in rows for token in (*prompt, *answer)]),
            "loss_mask": torch.tensor([bool(part) for row in rows for part in range(2) for _ in row[part]]),
        },
    )


def sampled(prompts: list[int], answers: list[int], samples: int) -> TrainBatch:
    """`samples` answers of `answers[i]` tokens to each of the prompts, which have `prompts[i]` tokens."""
    generator = torch.Generator().manual_seed(3)

    def ids(length: int) -> list[int]:
        return torch.randint(0, 61, (length,), generator=generator).tolist()

    texts = [ids(length) for length in prompts]
    return batch_of(
        *((text, ids(length + i)) for text, length in zip(texts, answers, strict=True) for i in range(samples))
    )


def test_a_prompt_is_laid_out_once() -> None:
    """Its last token predicts the answer's first one, so every row keeps its own."""
    batch = batch_of(([1, 2, 3], [7, 8]), ([4, 5], [9]), ([1, 2, 3], [9]), ([1, 2, 6], [7]))
    inputs = model_input(batch, CPU, SHARED)
    assert inputs.ids_BL.tolist() == [[1, 2, 3, 7, 8, 4, 5, 9, 3, 9, 6, 7]]
    assert inputs.position_ids_BL is not None and inputs.packed is not None and inputs.packed.keys is not None
    assert inputs.position_ids_BL.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2, 2, 3, 2, 3]]
    assert inputs.token_N.tolist() == [3, 4, 7, 11, 15] and inputs.label_N.tolist() == [7, 8, 9, 9, 7]
    assert inputs.select_N.tolist() == [2, 3, 6, 8, 10]  # of 3, 7 | 5 | 3 | 6
    assert inputs.packed.lengths == (5, 3, 2, 2) and inputs.packed.starts.tolist() == [0, 5, 8, 10, 12]
    assert inputs.packed.keys.starts.tolist() == [0, 5, 8, 12, 16] and inputs.packed.keys.longest == 5
    assert inputs.packed.keys.tokens.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 8, 9, 0, 1, 10, 11]


def test_rows_without_a_common_prompt_are_packed_as_ever() -> None:
    batch = batch_of(([1, 2, 3], [7, 8]), ([1, 3, 3], [7, 8]), ([1], [9]), ([1], [9]))
    inputs = model_input(batch, CPU, SHARED)
    assert inputs.packed is not None and inputs.packed.keys is None
    assert torch.equal(inputs.ids_BL[0], batch.tokens["ids"])


def test_rows_that_train_nothing_keep_a_token() -> None:
    batch = batch_of(([1, 2, 3], []), ([1, 2, 3], []), ([1, 2], [3]), ([], []))
    inputs = model_input(batch, CPU, SHARED)
    assert inputs.ids_BL.tolist() == [[1, 2, 3, 3, 1, 2, 3]] and not set(inputs.token_N.tolist()) - {8}


@pytest.mark.parametrize("window", [None, 4, 9])
@pytest.mark.parametrize("way", ["masked", "causal", "kernel"])
def test_a_row_attends_to_the_prompt_of_another(window: int | None, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if way == "kernel":
        monkeypatch.setattr(varlen, "_kernel_takes", lambda *_: True)
        monkeypatch.setattr(varlen, "varlen_attn", kernel_by_definition)
    elif way == "causal":  # as for long rows
        monkeypatch.setattr(varlen, "MASKED_LENGTH", 3)
    rows = PackedRows.sharing([9, 4, 3, 8], [slice(0, 0), slice(0, 6), slice(0, 0), slice(0, 6)], CPU)
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(1, heads, 24, 8, generator=generator) for heads in (4, 2, 2)]
    found, _ = varlen.varlen_attention(
        torch.nn.Module(), *tensors, None, scaling=8**-0.5, sliding_window=window, **rows.attention_arguments()
    )
    whole = [*range(9), *range(6), *range(9, 13), *range(13, 16), *range(6), *range(16, 24)]
    own = [*range(9), *range(15, 19), *range(19, 22), *range(28, 36)]
    expected = defined(*(x[:, :, whole] for x in tensors), (9, 10, 3, 14), window)[:, own]
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_models_give_the_same_with_shared_prompts(family: str) -> None:
    batch = sampled([9, 14, 2], [5, 11, 8], samples=3)
    model = CausalModel(tiny(family).double(), head_chunk_tokens=None)
    results = []
    for share in (False, True):
        layout = layout_of([model.model], remove_padding=True, share_prefixes=share)
        inputs = model_input(batch, CPU, layout)
        assert inputs.ids_BL.numel() == len(batch.tokens["ids"]) - share * 2 * (8 + 13 + 1)
        results.append(log_probs_and_gradient(model, inputs))
    (whole_N, whole), (shared_N, shared) = results
    torch.testing.assert_close(shared_N, whole_N, rtol=1e-6, atol=1e-6)
    assert relative_error(shared, whole) < 1e-6


@pytest.mark.parametrize(
    "settings",
    [
        ["actor.kl_loss_type=full_reverse", "actor.kl_topk_tokens=8"],
        ["actor.kl_loss_type=full_forward", "actor.kl_topk_tokens=8"],
        ["actor.kl_loss_type=full_reverse"],
        ["actor.kl_loss_type=low_var_kl", "model.enable_gradient_checkpointing=true"],
    ],
)
def test_an_update_is_the_same_with_shared_prompts(
    settings: list[str], model_path: str, other_model_path: str, run_dir: Path
) -> None:
    """Through the engine: plan, anchor and all; the tokens are counted at the policy's embedding."""
    batch = make_batch(12)
    with_kl = ("actor.use_kl_loss=true", "actor.kl_loss_coef=0.3", *settings)
    overrides = [f"actor_rollout_ref.{setting}" for setting in with_kl]
    by_way, tokens = {}, {}
    for share in (False, True):
        engine = make_engine(model_path, run_dir, *overrides, f"{GROUPER}={share}", anchor_path=other_model_path)
        assert engine.layout.share_prefixes is share
        seen: list[int] = []
        engine.policy.model.get_input_embeddings().register_forward_hook(
            lambda _, given, __, seen=seen: seen.append(given[0].numel())
        )
        by_way[share], tokens[share] = gradients(engine, batch), seen
    assert relative_error(by_way[True], by_way[False]) < 1e-5
    shared = sum(
        int(mask_T.nonzero()[0]) - 1 for mask_T in batch.tokens["loss_mask"].split(batch.lengths_B.tolist())[1::2]
    )
    assert shared > 0 and sum(tokens[False]) - sum(tokens[True]) == shared


def test_rows_of_one_prompt_go_together_and_its_tokens_count_once() -> None:
    batch = sampled([100, 100, 100, 100], [9, 9, 9, 9], samples=4)  # a group: 99 + 4 * 1 + 9 + 10 + 11 + 12 = 145
    prefixes = SHARED.prefixes(batch)
    parts = plan(batch.lengths_B, 1, 0, Budget(tokens=580), SHARED, prefixes)
    assert parts == [list(range(16))]  # 4 * 145 = 580
    halves = plan_all(batch.lengths_B, 2, Budget(tokens=580), SHARED, prefixes)
    assert sorted(row for (rows,) in halves for row in rows) == list(range(16))
    assert all(model_input(batch.select(rows), CPU, SHARED).ids_BL.numel() == 290 for (rows,) in halves)


@pytest.mark.parametrize("budget", [Budget(rows=8), Budget(rows=3), Budget(tokens=2000), Budget(tokens=300)])
@pytest.mark.parametrize("num_ranks", [1, 8])
def test_budgets_hold_and_every_row_is_computed_once(budget: Budget, num_ranks: int) -> None:
    batch = sampled([40, 90, 10, 60, 300, 40, 70], [50, 20, 90, 60, 40, 10, 200], samples=5)
    prefixes = SHARED.prefixes(batch)
    plans = plan_all(batch.lengths_B, num_ranks, budget, SHARED, prefixes)
    assert len({len(parts) for parts in plans}) == 1
    assert sorted(row for parts in plans for rows in parts for row in rows) == list(range(len(batch)))
    for rows in (rows for parts in plans for rows in parts if len(rows) > 1):
        assert budget.rows is None or len(rows) <= budget.rows
        assert budget.tokens is None or model_input(batch.select(rows), CPU, SHARED).ids_BL.numel() <= budget.tokens


@pytest.mark.parametrize(
    ("num_prompts", "samples", "budget", "share_of_all"),
    [(64, 5, Budget(tokens=16384), 0.89), (64, 8, Budget(rows=8), 0.95), (12, 5, Budget(rows=8), 1.01)],
)
def test_ranks_are_done_earlier(num_prompts: int, samples: int, budget: Budget, share_of_all: float) -> None:
    """Eight ranks, prompts of 200 tokens and answers of 300 to 1,800: the time of all rounds, in tokens of the slowest
    rank, against that of all tokens without a wait. Where whole groups balance badly they are divided.
    """
    answers = torch.randint(300, 1800, (num_prompts,), generator=torch.Generator().manual_seed(0)).tolist()
    batch = sampled([200] * num_prompts, answers, samples)
    prefixes = SHARED.prefixes(batch)
    ranks = plan_all(batch.lengths_B, 8, budget, SHARED, prefixes)
    tokens = [[model_input(batch.select(rows), CPU, SHARED).ids_BL.numel() for rows in parts] for parts in ranks]
    slowest = sum(max(side_by_side) for side_by_side in zip(*tokens, strict=True))
    assert 8 * slowest <= share_of_all * int(batch.lengths_B.sum())


def in_sequences() -> TrainBatch:
    """Two rollouts of each of four prompts. No token of their first sequence is trained; two more begin with a text of
    the rollout's own.
    """
    generator = torch.Generator().manual_seed(4)

    def ids(shortest: int, longest: int) -> list[int]:
        length = int(torch.randint(shortest, longest, (1,), generator=generator))
        return torch.randint(0, 61, (length,), generator=generator).tolist()

    rows: list[tuple[list[int], list[int]]] = []
    for prompt in [ids(20, 21) for _ in range(4)]:
        for text in (prompt + ids(20, 60), prompt + ids(20, 60)):
            rows += [(prompt, ids(3, 4)), (text, ids(5, 40)), (text, ids(5, 40))]
    batch = batch_of(*rows)
    batch.rows["rollout"] = torch.arange(8).repeat_interleave(3)
    batch.tokens["loss_mask"] &= batch.row_of_token_T % 3 != 0
    return batch


WHOLE = sampled([40, 90, 10, 60], [50, 20, 90, 60], samples=4)
LATER_SEQUENCES = [[row for row in range(start, start + 12) if row % 3] for start in (0, 12)]


@pytest.mark.parametrize(
    ("batch", "parts", "budget"),
    [
        (WHOLE, [[0, 1, 2, 3, 12, 13], [4, 5, 6, 7, 8, 9, 10, 11, 14, 15]], Budget(tokens=300)),
        (in_sequences(), LATER_SEQUENCES, Budget(tokens=250)),
    ],
)
def test_all_ranks_expect_the_rows_that_each_plans(
    batch: TrainBatch, parts: list[list[int]], budget: Budget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one rank computed for another's rows is sent to where the update will want it."""
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    planned: list[set[int]] = [set(), set()]
    for part in parts:
        mini_batch = batch.select(part)
        for rank, rows in enumerate(planned):
            micro_batches = plan(mini_batch.lengths_B, 2, rank, budget, SHARED, SHARED.prefixes(mini_batch))
            rows.update(part[row] for micro_batch in micro_batches for row in micro_batch)
    assert rows_of_ranks(batch, parts, budget, SHARED) == [sorted(rows) for rows in planned]


def test_what_cannot_share_says_so(model_path: str, run_dir: Path) -> None:
    with pytest.raises(ValueError, match="packed rows only"):
        Layout(packed=False, share_prefixes=True)
    padded = make_engine(model_path, run_dir, "actor_rollout_ref.model.use_remove_padding=false")
    assert not padded.layout.share_prefixes
