"""A rollout in several sequences trains what it trains in one: loss and gradient, to 1e-12 in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import engine_workers
import pytest
import torch
from cut_rollouts import batch_of, cut, rollouts, written
from engine_cases import VOCABULARY, make_engine, relative_error
from engine_state import full_state, gradients
from hypothesis import given
from hypothesis import strategies as st
from transformers import GPT2Config, GPT2ForTokenClassification, GPT2LMHeadModel
from value_cases import value_engine

from verl.engine.batching import model_input
from verl.engine.device.runtime import Precision
from verl.engine.policy_engine import PolicyEngine
from verl.engine.trained import TrainedEngine
from verl.engine.value_engine import ValueEngine
from verl.protocol import Segment, Source, TrainBatch

ACTOR, EXACT = "actor_rollout_ref.actor", 1e-12
TURNS = [3, 1, 2, 4, 5]
CUTS = st.lists(st.sets(st.integers(0, 3)), min_size=len(TURNS), max_size=len(TURNS))
ALL_CUT = [{0, 1, 2, 3}] * len(TURNS)
SOME_CUT: list[set[int]] = [{1}, set(), {0}, {0, 2}, {3}]

ROW_MEANS = f"{ACTOR}.loss_agg_mode=seq-mean-token-mean"
KL = (f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.kl_loss_coef=0.3")
CORRECTED = f"{ACTOR}.rollout_correction.importance=sequence"
LOSSES: dict[str, tuple[str, ...]] = {
    **{
        mode: (f"{ACTOR}.loss_agg_mode={mode}",) for mode in ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")
    },
    "seq-mean-token-sum-norm": (f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm", f"{ACTOR}.loss_scale_factor=7"),
    "gspo": (ROW_MEANS, f"{ACTOR}.policy_loss=gspo"),
    "cispo": (ROW_MEANS, f"{ACTOR}.policy_loss=cispo"),
    "llds_of_responses": (ROW_MEANS, f"{ACTOR}.llds_coef=0.5", f"{ACTOR}.llds_gate=response"),
    "llds_of_actions": (ROW_MEANS, f"{ACTOR}.llds_coef=0.5", f"{ACTOR}.llds_gate=action"),
    "sampled_kl": (ROW_MEANS, *KL, f"{ACTOR}.kl_loss_type=k3", f"{ACTOR}.use_kl_iw=true"),
    "whole_kl": (ROW_MEANS, *KL, f"{ACTOR}.kl_loss_type=full_reverse"),
    "top_k_kl": (ROW_MEANS, *KL, f"{ACTOR}.kl_loss_type=full_reverse", f"{ACTOR}.kl_topk_tokens=4"),
    "anchor_s_top_k": (ROW_MEANS, *KL, f"{ACTOR}.kl_loss_type=full_forward", f"{ACTOR}.kl_topk_tokens=4"),
}
TOKENS_AT_MOST = f"{ACTOR}.ppo_max_token_len_per_gpu=70"
LAYOUTS: dict[str, tuple[str, ...]] = {
    "shared": (),
    "shared_in_parts": (TOKENS_AT_MOST,),
    "packed": (f"{ACTOR}.use_prefix_grouper=false", TOKENS_AT_MOST),
    "padded": ("actor_rollout_ref.model.use_remove_padding=false", TOKENS_AT_MOST),
    "counted_rows": (f"{ACTOR}.use_dynamic_bsz=false", f"{ACTOR}.ppo_micro_batch_size=3"),
}


def write_gpt2(path: Path, kind: Any = GPT2LMHeadModel, seed: int = 0) -> str:
    """Its norms compute in the number format that they are given, unlike Qwen's."""
    torch.manual_seed(seed)
    sizes = {"vocab_size": VOCABULARY, "n_positions": 256, "n_embd": 32, "n_layer": 2, "n_head": 4}
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop", "classifier_dropout"), 0.0)
    tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    kind(GPT2Config(**sizes, **dropout, **tokens, initializer_range=0.3, num_labels=1)).save_pretrained(path)
    return str(path)


def in_float64(make: Callable[[], Any]) -> Any:
    exact = Precision(torch.float64, torch.float64)
    with mock.patch("verl.engine.files.loading.resolve_precision", return_value=exact):
        engine: TrainedEngine = make()
    for model in engine.models.values():
        model.double()
        if isinstance(engine, PolicyEngine):
            model.head_dtype = torch.float64  # type: ignore[assignment]
    return engine


def actor(model_path: str, anchor_path: str, run_dir: Path, *overrides: str) -> PolicyEngine:
    made: PolicyEngine = in_float64(lambda: make_engine(model_path, run_dir, *overrides, anchor_path=anchor_path))
    return made


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, Path]:
    """Of the policy and of an anchor that is another model; and a folder for runs."""
    folder = tmp_path_factory.mktemp("gpt2")
    return write_gpt2(folder / "policy"), write_gpt2(folder / "anchor", seed=1), folder


def both(cuts: Sequence[set[int]], turns: Sequence[int] = TURNS) -> tuple[TrainBatch, TrainBatch]:
    """The batch of whole rollouts, and that of the same ones cut. The last rollout is left out of the loss."""
    whole = rollouts(turns)
    pieces = [cut(one, behind) for one, behind in zip(whole, cuts, strict=True)]
    batches = batch_of(whole), batch_of(pieces)
    for batch in batches:
        batch.rows["adv_batch_std"] = torch.full((len(batch),), 0.5)
        batch.tokens["loss_mask"] &= batch.rollout_of_token_T < len(turns) - 1
    return batches


def loss_and_gradient(engine: PolicyEngine | ValueEngine, batch: TrainBatch) -> tuple[float, dict[str, torch.Tensor]]:
    found: list[float] = []
    accumulate = engine.learner.accumulate

    def recorded(*arguments: Any) -> dict[str, float]:
        means = accumulate(*arguments)
        found.append(means["loss"])
        return means

    with mock.patch.object(engine.learner, "accumulate", recorded):
        gradient = gradients(engine, batch)
    return found[0], gradient


@pytest.mark.parametrize("name", LOSSES)
@given(cuts=CUTS)
def test_the_actor_s_loss_and_gradient(paths: tuple[str, str, Path], name: str, cuts: list[set[int]]) -> None:
    engine = cached_actor(*paths, name, "shared_in_parts")
    whole, pieces = both(cuts)
    (expected, gradient), (found, of_pieces) = (loss_and_gradient(engine, one) for one in (whole, pieces))
    assert found == pytest.approx(expected, rel=EXACT) and expected
    assert relative_error(of_pieces, gradient) < EXACT


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["seq-mean-token-mean", "top_k_kl", "gspo"])
def test_however_rows_lie(paths: tuple[str, str, Path], name: str, layout: str) -> None:
    whole = both(ALL_CUT)[0]
    expected, gradient = loss_and_gradient(cached_actor(*paths, name, "packed"), whole)
    engine = cached_actor(*paths, name, layout)
    for cuts in (ALL_CUT, SOME_CUT):
        found, of_pieces = loss_and_gradient(engine, both(cuts)[1])
        assert found == pytest.approx(expected, rel=EXACT)
        assert relative_error(of_pieces, gradient) < EXACT


ENGINES: dict[tuple[str, ...], PolicyEngine] = {}


def cached_actor(policy: str, anchor: str, folder: Path, name: str, layout: str) -> PolicyEngine:
    if (key := (policy, name, layout)) not in ENGINES:
        ENGINES[key] = actor(policy, anchor, folder, *LOSSES[name], *LAYOUTS[layout])
    return ENGINES[key]


@pytest.fixture(scope="module")
def critic(tmp_path_factory: pytest.TempPathFactory) -> ValueEngine:
    folder = tmp_path_factory.mktemp("critic")
    path = write_gpt2(folder / "model", GPT2ForTokenClassification)
    made: ValueEngine = in_float64(lambda: value_engine(path, folder, "critic.ppo_max_token_len_per_gpu=70"))
    return made


@given(cuts=CUTS)
def test_the_critic_s_loss_gradient_and_values(critic: ValueEngine, cuts: list[set[int]]) -> None:
    (expected, gradient), (found, of_pieces) = (loss_and_gradient(critic, one) for one in both(cuts))
    assert found == pytest.approx(expected, rel=EXACT) and relative_error(of_pieces, gradient) < EXACT
    whole, pieces = both(cuts)
    values = [critic.values(batch).tokens["value"] for batch in (whole, pieces)]
    written_T = written([cut(one, behind) for one, behind in zip(rollouts(TURNS), cuts, strict=True)])
    torch.testing.assert_close(values[1][written_T], values[0], rtol=1e-6, atol=1e-6)


MINI = (f"{ACTOR}.ppo_mini_batch_size=2", f"{ACTOR}.ppo_epochs=2", f"{ACTOR}.shuffle=true", f"{ACTOR}.optim.lr=1e-3")


def updated(engine: PolicyEngine, batch: TrainBatch) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    return engine.update(batch), full_state(engine)


@pytest.mark.parametrize("name", ["seq-mean-token-mean", "sampled_kl", "gspo"])
def test_mini_batches_never_split_a_rollout(paths: tuple[str, str, Path], tmp_path: Path, name: str) -> None:
    """4 of 5 rollouts have something to train: twice two optimizer steps, whatever the number of sequences."""
    engines = [actor(*paths[:2], tmp_path, *LOSSES[name], *MINI) for _ in range(2)]
    whole, pieces = both(ALL_CUT)
    for part in engines[1].mini_batches(pieces):
        rollouts_of_part = pieces.rollout_B[part].unique()
        assert sorted(part) == torch.isin(pieces.rollout_B, rollouts_of_part).nonzero().flatten().tolist()
    (metrics, weights), (of_pieces, weights_of_pieces) = map(updated, engines, (whole, pieces))
    assert metrics["actor/num_updates"] == 4.0 and of_pieces == pytest.approx(metrics, rel=1e-9)
    assert relative_error(weights_of_pieces, weights) < 1e-9


def on_ranks(folder: Path, model_path: str, anchor_path: str) -> dict[str, Any]:
    """Losses and gradients of whole rollouts and of pieces, on the ranks there are."""
    found: dict[str, Any] = {}
    for name in ("seq-mean-token-mean", "top_k_kl", "gspo"):
        engine = actor(model_path, anchor_path, folder, *LOSSES[name], *LAYOUTS["shared_in_parts"])
        found[name] = [loss_and_gradient(engine, batch) for batch in both(ALL_CUT)]
    return found


def test_two_ranks(paths: tuple[str, str, Path], tmp_path: Path) -> None:
    ranks = engine_workers.run(tmp_path, *paths[:2], 2, on_ranks)
    alone = on_ranks(tmp_path, *paths[:2])
    for name, ((expected, gradient), _) in alone.items():
        for found, of_ranks in ranks[0][name]:
            assert found == pytest.approx(expected, rel=EXACT)
            assert relative_error(of_ranks, gradient) < EXACT


def test_sequences_share_what_they_begin_with(paths: tuple[str, str, Path]) -> None:
    """A further sequence computes what its rollout's first one does not have: of the whole cut into all its turns, the
    tokens of the second sequence that the first one has are left out.
    """
    layout = cached_actor(*paths, "token-mean", "shared").layout
    pieces = batch_of([cut(one, {0}) for one in rollouts([2])])
    first, second = pieces.lengths_B.tolist()
    inputs = model_input(pieces, torch.device("cpu"), layout)
    trained = int(pieces.tokens["loss_mask"].split([first, second])[1].sum())
    assert inputs.ids_BL.numel() == first + trained + 1, "the last token of the context predicts the first of the turn"


def test_contexts_that_are_not_what_was_seen_before(paths: tuple[str, str, Path]) -> None:
    """Only what is equal is shared: a context may keep the prompt, or less, or nothing of the first sequence."""
    made = rollouts([2, 2, 2])
    for one, (kept, more) in zip(made, [(4, (60, 59, 58)), (1, (60,)), (0, (7, 8, 9))], strict=True):
        one.segments.insert(3, Segment(Source.CONTEXT, (*one.ids[:kept], *more)))
    batch = batch_of(made)
    apart, shared = (cached_actor(*paths, "token-mean", layout) for layout in ("packed", "shared"))
    assert shared.layout.prefixes(batch).any
    (expected, gradient), (found, of_shared) = (loss_and_gradient(engine, batch) for engine in (apart, shared))
    assert found == pytest.approx(expected, rel=EXACT) and relative_error(of_shared, gradient) < EXACT
