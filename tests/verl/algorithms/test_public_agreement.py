"""The same numbers as the public veRL and TRL on random batches, and every known difference, stated and asserted.

Skipped, with the reason, where those libraries cannot be installed (no package index) or imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, product
from typing import Any

import pytest
import torch
from public_reference import Answer, Call, Layout, Unavailable, public_answers
from torch import Tensor

from verl.algorithms.advantages import ADVANTAGES, AdvantageInput, Advantages, AdvantageSettings
from verl.algorithms.advantages.rows import whitened
from verl.algorithms.aggregation import LOSS_AGGREGATIONS, loss_weights
from verl.algorithms.kl import EXACT_KL, penalised_rewards, sampled_kl
from verl.algorithms.log_probs import entropy
from verl.algorithms.policy_loss import POLICY_LOSSES, Clip, PolicyLoss
from verl.algorithms.rollout_correction import CorrectionSettings, rollout_correction
from verl.algorithms.value_loss import value_loss

CORE = "verl.trainer.ppo.core_algos:"
CORRECTION = "verl.trainer.ppo.rollout_corr_helper:"
TORCH = "verl.utils.torch_functional:"
NORM_LENGTH = 50
OFF = 1e9  # public veRL always has a dual bound: one that is never reached

Numbers = dict[str, Tensor]


@dataclass(frozen=True)
class Batch(Layout):
    """Numbers at every position [B, L], policy token or not; rewards at policy tokens only."""

    name: str
    of: dict[str, Tensor]

    def padded(self, *names: str) -> dict[str, Tensor]:
        """What public veRL takes: the named numbers and the mask."""
        return {name: self.of[name] for name in names} | {"response_mask": self.mask_BL.to(self.of["reward"].dtype)}

    def input(self, chain_BL: Tensor | None = None) -> AdvantageInput:
        return AdvantageInput(
            self.flat(self.of["reward"]),
            self.mask_T,
            self.row_T,
            self.group_B,
            self.flat(self.of["value"]),
            self.of["baseline_B"],
            None if chain_BL is None else self.flat(chain_BL),
        )


def random_batch(
    name: str, seed: int, num_rows: int, length: int, dtype: torch.dtype, share: float = 0.6, empty_row: bool = False
) -> Batch:
    """Rows of random length; each token is the policy's with probability `share`.

    No row is alone in its group: public veRL makes its reward its advantage, even where the others only failed.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype)

    num_B = torch.randint(2, length + 1, (num_rows,), generator=generator)
    num_B[0] = length
    valid_BL = torch.arange(length) < num_B[:, None]
    mask_BL = valid_BL & (torch.rand(num_rows, length, generator=generator) < share)
    mask_BL[:, 0] = True
    if empty_row:
        mask_BL[1] = False
    group_B = torch.arange(num_rows) % max(1, num_rows // 4)
    log_prob_BL = -3 * torch.rand(num_rows, length, generator=generator, dtype=dtype)
    numbers = {
        "reward": normal(num_rows, length) * mask_BL,
        "value": normal(num_rows, length),
        "old_value": normal(num_rows, length),
        "target": normal(num_rows, length),
        "advantage": normal(num_rows, length),
        "log_prob": log_prob_BL,
        "old_log_prob": log_prob_BL + 0.8 * normal(num_rows, length),
        # in every third row far enough for the limits of k3
        "ref_log_prob": log_prob_BL + normal(num_rows, length) * (1 + 20 * (torch.arange(num_rows) % 3 == 0))[:, None],
        "logits": 2 * normal(num_rows, length, 11),
        "ref_logits": 2 * normal(num_rows, length, 11),
        "baseline_B": normal(num_rows),
    }
    return Batch(valid_BL, mask_BL, group_B, name, numbers)


BATCHES = [
    random_batch("small", 0, 5, 7, torch.float64),
    random_batch("many rows", 1, 24, 40, torch.float64),
    random_batch("no environment tokens", 2, 9, 12, torch.float64, share=1.0),
    random_batch("float32", 3, 8, 16, torch.float32),
]
# Public veRL, too, leaves rows without policy tokens out of the means over rows.
LOSS_BATCHES = [*BATCHES, random_batch("a row without policy tokens", 4, 8, 10, torch.float64, empty_row=True)]


@dataclass(frozen=True)
class Comparison:
    """What to ask the public implementation, how to read its answer, and this project's answer, by the same names."""

    name: str
    call: Call
    theirs: Callable[[Answer], Numbers]
    ours: Callable[[], Numbers]


# ---- advantages


def advantages(batch: Batch) -> Iterator[Comparison]:
    index = {"index": batch.group_B.tolist()}
    config = {"config": Call("verl.trainer.config:AlgoConfig", {"gamma": 0.9})}
    plain = AdvantageSettings(gamma=0.9, lam=0.8, scale="none")
    scaled = AdvantageSettings(scale="group_std")
    estimators: list[tuple[str, str, AdvantageSettings, dict[str, Any]]] = [
        ("grpo_outcome_advantage", "grpo", scaled, index),
        ("grpo_outcome_advantage", "grpo", plain, index | {"norm_adv_by_std_in_grpo": False}),
        ("rloo_outcome_advantage", "rloo", plain, index),
        ("opo_outcome_advantage", "opo", plain, index),
        ("reinforce_plus_plus_baseline_outcome_advantage", "reinforce_plus_plus_baseline", plain, index),
        ("reinforce_plus_plus_outcome_advantage", "reinforce_plus_plus", plain, config),
        ("remax_outcome_advantage", "remax", plain, {"reward_baselines": batch.of["baseline_B"]}),
        ("gae_advantage_return", "gae", plain, {"values": batch.of["value"], "gamma": 0.9, "lam": 0.8}),
    ]
    for public, name, settings, given in estimators:
        yield advantage(batch, f"{CORE}compute_{public}", name, settings, given, batch.mask_BL)
    # Search-R1's GAE visits all response tokens: public veRL's with all of them taken as the policy's.
    gae = {"values": batch.of["value"], "gamma": 0.9, "lam": 0.8, "response_mask": batch.valid_BL.to(batch.of["value"])}
    yield advantage(batch, f"{CORE}compute_gae_advantage_return", "gae", plain, gae, batch.valid_BL)


def advantage(
    batch: Batch, public: str, name: str, settings: AdvantageSettings, given: dict[str, Any], chain_BL: Tensor
) -> Comparison:
    call = Call(public, {"token_level_rewards": batch.of["reward"]} | batch.padded() | given)
    over_all = chain_BL is not batch.mask_BL

    def ours() -> Numbers:
        found: Advantages = ADVANTAGES[name](batch.input(chain_BL if over_all else None), settings)
        names = {"advantage": found.advantage_T, "return": found.return_T}
        return {key: value_T[batch.flat(chain_BL)] for key, value_T in names.items() if value_T is not None}

    def theirs(answer: Answer) -> Numbers:
        # estimators on rows return their advantages a second time, as returns: this project's have none
        return {key: value_BL[chain_BL] for key, value_BL in zip(("advantage", "return"), answer.values, strict=True)}

    kind = f"{name} {settings.scale}{' over all tokens' if over_all else ''}"
    return Comparison(f"{kind}, {batch.name}", call, theirs, ours)


def whitening(batch: Batch) -> Iterator[Comparison]:
    call = Call(f"{TORCH}masked_whiten", {"values": batch.of["value"], "mask": batch.padded()["response_mask"]})
    yield per_token("whitening", batch, call, lambda: {"value": whitened(batch.policy(batch.of["value"]))})


# ---- losses


def policy_losses(batch: Batch) -> Iterator[Comparison]:
    for (public, name, clip), mode in product(
        [
            (f"{CORE}compute_policy_loss_vanilla", "ppo", Clip(0.2, 0.28, 3.0)),
            (f"{CORE}compute_policy_loss_vanilla", "ppo", Clip(0.2, 0.2)),
            (f"{CORE}compute_policy_loss_gspo", "gspo", Clip(0.05, 0.1)),
            (f"{CORE}compute_policy_loss_cispo", "cispo", Clip(0.2, 0.28)),
            (f"{CORE}compute_policy_loss_reinforce", "reinforce", Clip()),
        ],
        LOSS_AGGREGATIONS,
    ):
        yield policy_comparison(batch, public, name, clip, mode)


def policy_comparison(batch: Batch, public: str, name: str, clip: Clip, mode: str) -> Comparison:
    old = "rollout_log_prob" if name == "reinforce" else "old_log_prob"
    tensors = {"log_prob": batch.of["log_prob"], old: batch.of["old_log_prob"], "advantages": batch.of["advantage"]}
    settings = {"loss_agg_mode": mode, "config": actor_config(clip)}

    def ours() -> Numbers:
        log_prob_N = batch.policy(batch.of["log_prob"]).requires_grad_()
        found = our_policy_loss(name, batch, log_prob_N, clip)
        clipped = {} if name == "reinforce" else {"clipped": found.clipped_T.double().mean()}
        return aggregated(batch, mode, found.loss_T, log_prob_N) | clipped

    def theirs(answer: Answer) -> Numbers:
        loss, metrics = answer.values
        shares = [metrics[key] for key in ("actor/pg_clipfrac", "actor/pg_clipfrac_lower") if key in metrics]
        return loss_and_gradient(batch, loss, answer) | {"clipped": torch.tensor(sum(shares))}

    call = Call(public, tensors | batch.padded() | settings, "log_prob")
    return Comparison(f"{name} dual {clip.dual} {mode}, {batch.name}", call, theirs, ours)


def actor_config(clip: Clip) -> Call:
    given = {"strategy": "fsdp", "rollout_n": 1, "ppo_micro_batch_size_per_gpu": 1, "clip_ratio": clip.low}
    bounds = {"clip_ratio_low": clip.low, "clip_ratio_high": clip.high, "clip_ratio_c": clip.dual or OFF}
    constant = {"global_batch_info": {"loss_scale_factor": NORM_LENGTH}}
    return Call("verl.workers.config:ActorConfig", given | bounds | constant)


def our_policy_loss(name: str, batch: Batch, log_prob_N: Tensor, clip: Clip) -> PolicyLoss:
    row_N = batch.row_T[batch.mask_T]
    old_N, advantage_N = batch.policy(batch.of["old_log_prob"]), batch.policy(batch.of["advantage"])
    return POLICY_LOSSES[name](log_prob_N, old_N, advantage_N, row_N, clip)


def aggregated(batch: Batch, mode: str, loss_N: Tensor, by_N: Tensor) -> Numbers:
    weight_T = loss_weights(batch.mask_T, batch.row_T, len(batch.group_B), mode, NORM_LENGTH)
    loss = (weight_T[batch.mask_T] * loss_N).sum()
    return {"loss": loss.detach(), "gradient": torch.autograd.grad(loss, by_N)[0]}


def loss_and_gradient(batch: Batch, loss: Tensor, answer: Answer) -> Numbers:
    assert answer.gradient is not None and not answer.gradient[~batch.mask_BL].any()
    return {"loss": loss, "gradient": batch.policy(answer.gradient)}


def value_losses(batch: Batch) -> Iterator[Comparison]:
    for mode in LOSS_AGGREGATIONS:
        tensors = {"vpreds": batch.of["value"], "values": batch.of["old_value"], "returns": batch.of["target"]}
        settings = {"cliprange_value": 0.5, "loss_agg_mode": mode, "loss_scale_factor": NORM_LENGTH}

        def ours(mode: str = mode) -> Numbers:
            value_N = batch.policy(batch.of["value"]).requires_grad_()
            old_N, target_N = batch.policy(batch.of["old_value"]), batch.policy(batch.of["target"])
            found = value_loss(value_N, old_N, target_N, 0.5)
            return aggregated(batch, mode, found.loss_T, value_N) | {"clipped": found.clipped_T.double().mean()}

        def theirs(answer: Answer) -> Numbers:
            # the gradient is that of the first result, which has the factor 1/2 in it
            return loss_and_gradient(batch, answer.values[0], answer) | {"clipped": answer.values[1]}

        call = Call(f"{CORE}compute_value_loss", tensors | batch.padded() | settings, "vpreds")
        yield Comparison(f"value loss {mode}, {batch.name}", call, theirs, ours)


# ---- KL and entropy


def per_token(name: str, batch: Batch, call: Call, ours: Callable[[], Numbers], key: str = "value") -> Comparison:
    """Results [B, L] (and the gradient of their sum), compared at policy tokens."""

    def theirs(answer: Answer) -> Numbers:
        gradient = {} if answer.gradient is None else {"gradient": batch.policy(answer.gradient)}
        return {key: batch.policy(answer.values[0])} | gradient

    return Comparison(f"{name}, {batch.name}", call, theirs, ours)


def with_gradient(function: Callable[[Tensor], Tensor], by: Tensor) -> Numbers:
    by = by.clone().requires_grad_()
    value = function(by)
    return {"value": value.detach(), "gradient": torch.autograd.grad(value.sum(), by)[0]}


def sampled_kls(batch: Batch) -> Iterator[Comparison]:
    log_prob_BL, ref_BL = batch.of["log_prob"], batch.of["ref_log_prob"]
    for name in ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "kl+", "abs+", "k3+"):
        given = {"logprob": log_prob_BL, "ref_logprob": ref_BL, "kl_penalty": name}

        def ours(name: str = name) -> Numbers:
            return with_gradient(lambda new_N: sampled_kl(name)(new_N, batch.policy(ref_BL)), batch.policy(log_prob_BL))

        yield per_token(f"sampled KL {name}", batch, Call(f"{CORE}kl_penalty", given, "logprob"), ours)

    given = {"token_level_scores": batch.of["reward"], "old_log_prob": log_prob_BL, "ref_log_prob": ref_BL}

    def penalised() -> Numbers:
        kl_T = sampled_kl("k1")(batch.flat(log_prob_BL), batch.flat(ref_BL))
        return {"value": penalised_rewards(batch.flat(batch.of["reward"]), kl_T, batch.mask_T, 0.1)[batch.mask_T]}

    yield per_token("KL in the reward", batch, Call(f"{CORE}compute_rewards", given | {"kl_ratio": 0.1}), penalised)


def exact_kls(batch: Batch) -> Iterator[Comparison]:
    log_p_BLV, log_q_BLV = batch.of["logits"].log_softmax(-1), batch.of["ref_logits"].log_softmax(-1)
    for name, alpha in [("full_forward", 0.0), ("full_reverse", 1.0)]:
        given = {"student_log_probs": log_p_BLV, "teacher_log_probs": log_q_BLV, "alpha": alpha}

        def ours(name: str = name) -> Numbers:
            return with_gradient(lambda p: EXACT_KL[name].value(p, batch.policy(log_q_BLV)), batch.policy(log_p_BLV))

        call = Call("trl.experimental.sdpo.loss_utils:compute_divergence", given, "student_log_probs")
        yield per_token(f"TRL {name}", batch, call, ours)
        yield exact_kl_of_a_head(batch, name, alpha)


def exact_kl_of_a_head(batch: Batch, name: str, alpha: float) -> Comparison:
    """TRL's kernel takes hidden states and a head, in float32: with the identity as head, hidden states are logits."""
    logits_NV, ref_logits_NV = batch.policy(batch.of["logits"]).float(), batch.policy(batch.of["ref_logits"]).float()
    head_VV = torch.eye(logits_NV.shape[-1])
    given: dict[str, Any] = {"hidden": logits_NV, "head": head_VV, "bias": None}
    given |= {"ref_hidden": ref_logits_NV, "ref_head": head_VV, "ref_bias": None, "beta": alpha}

    def ours() -> Numbers:
        log_p_NV, log_q_NV = logits_NV.log_softmax(-1), ref_logits_NV.log_softmax(-1)
        kl_N = EXACT_KL[name].value(log_p_NV, log_q_NV)
        gradient_NV = EXACT_KL[name].logit_gradient(log_p_NV, log_q_NV, kl_N)
        return {"value": kl_N, "gradient": gradient_NV, "entropy": entropy(log_p_NV)}

    def theirs(answer: Answer) -> Numbers:
        assert answer.gradient is not None
        return {"value": answer.values[0], "gradient": answer.gradient, "entropy": answer.values[1]}

    function = "trl.kernels.chunked_divergence:ChunkedDivergenceFunction.apply"
    return Comparison(f"TRL head {name}, {batch.name}", Call(function, given, "hidden", True), theirs, ours)


def entropies(batch: Batch) -> Iterator[Comparison]:
    logits_BLV = batch.of["logits"]

    def ours() -> Numbers:
        return with_gradient(lambda logits_NV: entropy(logits_NV.log_softmax(-1)), batch.policy(logits_BLV))

    for library, function in [
        ("veRL", f"{TORCH}entropy_from_logits"),
        ("TRL", "trl.trainer.utils:entropy_from_logits"),
    ]:
        yield per_token(f"entropy of {library}", batch, Call(function, {"logits": logits_BLV}, "logits"), ours)


# ---- correction for the sampler


def corrections(batch: Batch) -> Iterator[Comparison]:
    log_ratio: dict[str, Any] = {"log_ratio": batch.of["log_prob"] - batch.of["old_log_prob"]} | batch.padded()
    for level in ("token", "sequence"):
        settings = CorrectionSettings(importance=level, importance_cap=1.5)  # type: ignore[arg-type]
        given = log_ratio | {"rollout_is": level, "rollout_is_threshold": 1.5}
        call = Call(f"{CORRECTION}compute_rollout_correction_weights", given)
        yield per_token(f"{level} weights", batch, call, correction(batch, settings, "weight"), "weight")
    # their bounds are for sampler / trainer, this project's for trainer / sampler: [1/2, 5/4] is [4/5, 2] there
    for level, public in [("token", "token_k1"), ("sequence", "seq_sum_k1"), ("geometric", "seq_mean_k1")]:
        settings = CorrectionSettings(reject=level, reject_low=0.5, reject_high=1.25)  # type: ignore[arg-type]
        given = log_ratio | {"rollout_rs": public, "rollout_rs_threshold": "0.8_2.0"}
        call = Call(f"{CORRECTION}compute_rollout_rejection_mask", given)
        yield per_token(f"{level} rejection", batch, call, correction(batch, settings, "keep"), "keep")
    given = {"per_token_loss": torch.ones_like(batch.of["log_prob"]), "clip_coeff": 1.5}
    given |= {"student_log_probs": batch.of["log_prob"], "old_log_probs": batch.of["old_log_prob"]}
    call = Call("trl.experimental.sdpo.loss_utils:apply_importance_sampling_clipping", given)
    settings = CorrectionSettings(importance="token", importance_cap=1.5)
    yield per_token("token weights of TRL", batch, call, correction(batch, settings, "weight"), "weight")


def correction(batch: Batch, settings: CorrectionSettings, key: str) -> Callable[[], Numbers]:
    def ours() -> Numbers:
        log_prob_T, old_T = batch.flat(batch.of["log_prob"]), batch.flat(batch.of["old_log_prob"])
        found = rollout_correction(log_prob_T, old_T, batch.mask_T, batch.row_T, len(batch.group_B), settings)
        value_T = {"weight": found.weight_T, "keep": found.keep_T}[key]
        return {key: value_T[batch.mask_T].to(log_prob_T.dtype)}

    return ours


# ---- tests

COMPARISONS = {
    comparison.name: comparison
    for comparison in chain(
        *(make(batch) for make in (advantages, whitening, sampled_kls, exact_kls, entropies) for batch in BATCHES),
        *(make(batch) for make in (policy_losses, value_losses, corrections) for batch in LOSS_BATCHES),
    )
}


def f64(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def grpo_without_std(reward_BL: Tensor, mask_BL: Tensor) -> Call:
    given = {"token_level_rewards": reward_BL, "response_mask": mask_BL, "index": [0] * len(mask_BL)}
    return Call(f"{CORE}compute_grpo_outcome_advantage", given | {"norm_adv_by_std_in_grpo": False})


REWARD_BL, EMPTY_BL = f64([0.0, 1.0], [0.0, 0.0], [0.0, 0.0]), f64([1.0, 1.0], [1.0, 1.0], [0.0, 0.0])
ON_ENVIRONMENT_BL, FIRST_BL = f64([1.0, 4.0], [0.0, 0.0]), f64([1.0, 0.0], [1.0, 0.0])
FAR_BL = {"log_prob": f64([0.0]), "old_log_prob": f64([-12.0]), "advantages": f64([-1.0]), "response_mask": f64([1.0])}
DIFFERENCES = {
    "empty row": grpo_without_std(REWARD_BL, EMPTY_BL),
    "environment reward": grpo_without_std(ON_ENVIRONMENT_BL, FIRST_BL),
    "far row": Call(f"{CORE}compute_policy_loss_gspo", FAR_BL | {"config": actor_config(Clip())}),
}


@pytest.fixture(scope="module")
def public(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answer]:
    calls = {name: comparison.call for name, comparison in COMPARISONS.items()}
    try:
        return public_answers(calls | DIFFERENCES, tmp_path_factory.mktemp("public"))
    except Unavailable as reason:
        pytest.skip(str(reason))


@pytest.mark.parametrize("name", COMPARISONS)
def test_same_as_public(name: str, public: dict[str, Answer]) -> None:
    theirs, ours = COMPARISONS[name].theirs(public[name]), COMPARISONS[name].ours()
    assert ours
    # in float32 the order of sums depends on the processor: an entropy differed by 1.3e-6, a gradient by 5e-6 of itself
    torch.testing.assert_close(ours, {key: theirs[key] for key in ours}, atol=2e-6, rtol=1e-5, check_dtype=False)


def ours_without_std(reward_BL: Tensor, mask_BL: Tensor) -> list[float]:
    row_T = torch.arange(len(mask_BL)).repeat_interleave(mask_BL.shape[1])
    group_B = torch.zeros(len(mask_BL), dtype=torch.int64)
    given = AdvantageInput(reward_BL.flatten(), mask_BL.flatten().bool(), row_T, group_B)
    return ADVANTAGES["grpo"](given, AdvantageSettings(scale="none")).advantage_T.tolist()


def test_a_row_without_policy_tokens_is_a_reward_of_zero_in_public_verl(public: dict[str, Answer]) -> None:
    # rewards 1 and 0: mean 1/2; with the empty row as a third reward of 0 the mean is 1/3
    torch.testing.assert_close(public["empty row"].values[0], f64([2 / 3, 2 / 3], [-1 / 3, -1 / 3], [0.0, 0.0]))
    assert ours_without_std(REWARD_BL, EMPTY_BL) == [0.5, 0.5, -0.5, -0.5, 0.0, 0.0]


def test_a_reward_on_an_environment_token_counts_in_public_verl(public: dict[str, Answer]) -> None:
    # the rewards are 1 + 4 and 0 there, mean 5/2; here 1 and 0, mean 1/2
    torch.testing.assert_close(public["environment reward"].values[0], f64([2.5, 0.0], [-2.5, 0.0]))
    assert ours_without_std(ON_ENVIRONMENT_BL, FIRST_BL) == [0.5, 0.0, -0.5, 0.0]


def test_the_log_ratio_of_gspo_is_held_at_10_in_public_verl(public: dict[str, Answer]) -> None:
    # with advantage -1 a ratio of e^12 is not clipped; this project holds log ratios at 20, as in PPO
    log_prob_T, old_T, advantage_T = (FAR_BL[name].flatten() for name in ("log_prob", "old_log_prob", "advantages"))
    ours = POLICY_LOSSES["gspo"](log_prob_T, old_T, advantage_T, torch.tensor([0]), Clip()).loss_T
    torch.testing.assert_close(public["far row"].values[0], f64([10.0]).exp().sum())
    torch.testing.assert_close(ours, f64([12.0]).exp().flatten())


def test_the_batches_reach_every_bound(public: dict[str, Answer]) -> None:
    metrics = public["ppo dual 3.0 token-mean, many rows"].values[1]
    assert metrics["actor/pg_clipfrac"] > 0 and metrics["actor/pg_clipfrac_lower"] > 0
    for name in ("gspo dual None", "cispo dual None"):
        assert 0 < public[f"{name} token-mean, many rows"].values[1]["actor/pg_clipfrac"] < 1
    assert 0 < public["value loss token-mean, many rows"].values[1] < 1
    assert public["sampled KL k3, many rows"].values[0].max() == 10
    for level in ("token", "sequence", "geometric"):
        kept_N = BATCHES[1].policy(public[f"{level} rejection, many rows"].values[0])
        assert 0 < kept_N.mean() < 1
