"""The critic: its values, its loss and its files against plain Hugging Face and numbers worked out by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import engine_workers
import pytest
import torch
import value_cases
from engine_cases import VOCABULARY, relative_error
from transformers import (
    AutoConfig,
    AutoModelForTokenClassification,
    AutoTokenizer,
    Olmo2Config,
    Olmo2ForCausalLM,
    Qwen2ForTokenClassification,
)
from value_cases import CLIP, defined_values, gradients, value_batch, value_engine, weights

from verl.engine.batching import merge_rows, selected_tokens
from verl.engine.value_engine import ValueEngine
from verl.errors import CheckpointError, ConfigError, NumericalError
from verl.protocol import TrainBatch


@pytest.fixture(scope="module")
def critic_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return value_cases.write_critic(tmp_path_factory.mktemp("critic"))


def all_values(engine: ValueEngine, batch: TrainBatch) -> torch.Tensor:
    answer = engine.values(batch)
    return merge_rows(batch.lengths_B, [(answer.rows, answer.tokens["value"])])


def with_tokens(batch: TrainBatch, **tokens: torch.Tensor) -> TrainBatch:
    return TrainBatch(batch.lengths_B, batch.tokens | tokens, batch.rows)


@pytest.fixture(scope="module")
def gpt2_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return value_cases.write_gpt2_critic(tmp_path_factory.mktemp("gpt2"))


@pytest.fixture(scope="module")
def plain(critic_path: str, tmp_path_factory: pytest.TempPathFactory) -> ValueEngine:
    """Its weights stay as they are."""
    return value_engine(critic_path, tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
def test_values_equal_a_plain_forward(critic_path: str, gpt2_path: str, tmp_path: Path, family: str) -> None:
    path = critic_path if family == "qwen2" else gpt2_path
    batch = value_batch()
    value_T = all_values(value_engine(path, tmp_path), batch)
    expected_T = defined_values(path, batch)[1]
    token_N = selected_tokens(batch)
    assert value_T.dtype == torch.float32 and expected_T[token_N].std() > 0.1
    torch.testing.assert_close(value_T[token_N].double(), expected_T[token_N], atol=1e-5, rtol=0)
    elsewhere_T = torch.ones(len(value_T), dtype=torch.bool).index_fill(0, token_N, False)
    assert not value_T[elsewhere_T].any()


@pytest.mark.parametrize(
    "overrides",
    [
        ("critic.forward_max_token_len_per_gpu=60",),
        ("critic.use_dynamic_bsz=false", "critic.forward_micro_batch_size=3"),
    ],
)
def test_micro_batches_change_no_value(
    plain: ValueEngine, critic_path: str, run_dir: Path, overrides: tuple[str, ...]
) -> None:
    batch = value_batch()
    value_T = all_values(value_engine(critic_path, run_dir, *overrides), batch)
    torch.testing.assert_close(value_T, all_values(plain, batch), atol=2e-6, rtol=0)


def test_bfloat16_decoder_and_float32_head(critic_path: str, run_dir: Path) -> None:
    batch = value_batch()
    engine = value_engine(critic_path, run_dir, "critic.model.fsdp_config.mixed_precision.param_dtype=bfloat16")
    token_N = selected_tokens(batch)
    value_N = all_values(engine, batch)[token_N]
    expected_N = defined_values(critic_path, batch)[1][token_N]
    assert 0 < (value_N - expected_N).abs().max() < 0.2 * expected_N.std()
    assert (value_N != value_N.bfloat16()).float().mean() > 0.9  # not rounded to 8 bits
    assert math.isfinite(engine.update(batch)["critic/grad_norm"])


def test_a_value_knows_only_what_came_before_its_token(plain: ValueEngine) -> None:
    batch = value_batch(1)
    batch.tokens["loss_mask"] = torch.ones_like(batch.tokens["loss_mask"])
    before_T = all_values(plain, batch)
    ids_T = batch.tokens["ids"]
    for t in (1, 5, len(ids_T) - 1):
        later_T = torch.arange(len(ids_T)) >= t
        changed_T = torch.where(later_T, (ids_T + 7) % VOCABULARY, ids_T)
        difference_T = (all_values(plain, with_tokens(batch, ids=changed_T)) - before_T).abs()
        assert difference_T[: t + 1].max() < 1e-6  # value t is that of the state before token t
        assert (difference_T[t + 1 :] > 1e-3).all()


def test_a_critic_from_a_language_model_starts_at_zero(model_path: str, run_dir: Path) -> None:
    engine = value_engine(model_path, run_dir)
    assert not all_values(engine, value_batch()).any()
    assert {"model.norm.weight", "score.weight", "score.bias"} < weights(engine).keys()


def test_the_first_update_by_hand(model_path: str, run_dir: Path) -> None:
    batch = value_batch()
    batch.tokens["values"].zero_()
    batch.tokens["returns"].fill_(3.0)
    engine = value_engine(model_path, run_dir, "critic.optim.lr_warmup_steps_ratio=0.4", "critic.optim.weight_decay=0")
    # V = 0 everywhere: loss (0 - 3)^2 / 2 = 4.5, its gradient by the head's bias is the mean of V - R = -3
    assert gradients(engine, batch)["score.bias"].tolist() == pytest.approx([-3.0])
    metrics = engine.update(batch)
    norm = metrics.pop("critic/grad_norm")
    rate = 1e-2 / 4  # the first of 4 warm-up steps
    expected = {"critic/vf_loss": 4.5, "critic/vf_clipfrac": 0.0, "critic/vpred_mean": 0.0, "critic/lr": rate}
    assert metrics == pytest.approx(expected)
    assert norm > 3.0
    assert weights(engine)["score.bias"].tolist() == pytest.approx([rate], rel=1e-4)  # AdamW's first step is the rate
    # values lie beyond old + clip once old values are said to be -1: the clipped branch |-0.5 - 3| is the larger one
    batch.tokens["values"].fill_(-1.0)
    metrics = engine.update(batch)
    assert metrics["critic/vf_clipfrac"] == pytest.approx(1.0)
    assert metrics["critic/vf_loss"] == pytest.approx(0.5 * 3.5**2)
    assert metrics["critic/grad_norm"] == 0.0
    assert metrics["critic/lr"] == pytest.approx(2 * rate)


def defined_gradient(path: str, batch: TrainBatch) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Autograd in float64 on the clipped value loss over the mask, written out."""
    model, value_T = defined_values(path, batch)
    old_T, return_T = batch.tokens["values"].double(), batch.tokens["returns"].double()
    near_T = torch.minimum(torch.maximum(value_T, old_T - CLIP), old_T + CLIP)
    free_T, clipped_T = (value_T - return_T) ** 2, (near_T - return_T) ** 2
    loss_T = torch.maximum(free_T, clipped_T) / 2
    mask_T = batch.tokens["loss_mask"]
    loss_T[mask_T].mean().backward()
    means = {"vf_loss": loss_T, "vpred_mean": value_T, "vf_clipfrac": (clipped_T > free_T).double()}
    gradient = {name: parameter.grad for name, parameter in model.named_parameters()}
    return gradient, {f"critic/{name}": float(number_T.detach()[mask_T].mean()) for name, number_T in means.items()}


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("critic.ppo_max_token_len_per_gpu=40",),
        ("critic.use_dynamic_bsz=false", "critic.ppo_micro_batch_size=2"),
        ("critic.model.enable_gradient_checkpointing=true",),
    ],
)
def test_gradient_is_autograd_on_the_definition(critic_path: str, run_dir: Path, overrides: tuple[str, ...]) -> None:
    batch = value_batch()
    expected, means = defined_gradient(critic_path, batch)
    assert 0.1 < means["critic/vf_clipfrac"] < 0.9
    engine = value_engine(critic_path, run_dir, *overrides)
    assert relative_error(gradients(engine, batch), expected) < 1e-5
    metrics = engine.update(batch)
    assert {name: metrics[name] for name in means} == pytest.approx(means, rel=1e-5)
    norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in expected.values()))
    assert metrics["critic/grad_norm"] == pytest.approx(norm, rel=1e-5)


def test_packed_rows_give_the_same_gradient(plain: ValueEngine, critic_path: str, run_dir: Path) -> None:
    batch = value_batch()
    padded = value_engine(critic_path, run_dir, "critic.model.use_remove_padding=false")
    assert plain.layout.packed and not padded.layout.packed
    assert relative_error(gradients(plain, batch), gradients(padded, batch)) < 1e-5


def test_nothing_is_random_in_training(gpt2_path: str, run_dir: Path) -> None:
    batch = value_batch()
    engine = value_engine(gpt2_path, run_dir)
    first, second = gradients(engine, batch), gradients(engine, batch)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("name", ["values", "returns"])
def test_masked_positions_change_no_bit(critic_path: str, run_dir: Path, name: str) -> None:
    batch = value_batch()
    number_T = batch.tokens[name]
    garbage = with_tokens(batch, **{name: number_T.masked_fill(~batch.tokens["loss_mask"], float("nan"))})
    results = []
    for given in (batch, garbage):
        engine = value_engine(critic_path, run_dir)
        results.append((engine.update(given), weights(engine)))
    (metrics, state), (garbage_metrics, garbage_state) = results
    assert garbage_metrics == metrics
    assert all(torch.equal(garbage_state[key], tensor) for key, tensor in state.items())
    masks = [mask_L.roll(1) for mask_L in batch.tokens["loss_mask"].split(batch.lengths_B.tolist())]
    with pytest.raises(NumericalError):  # a mask that is one position off does meet the garbage
        engine.update(with_tokens(garbage, loss_mask=torch.cat(masks)))


def test_mini_batches_epochs_and_order(critic_path: str, run_dir: Path) -> None:
    batch = value_batch(7)
    settings = ("critic.ppo_mini_batch_size=3", "critic.ppo_epochs=2")

    def trained(*overrides: str) -> ValueEngine:
        engine = value_engine(critic_path, run_dir, *settings, *overrides)
        engine.update(batch)
        return engine

    plain = trained()
    steps = {int(state["step"]) for state in plain.learner.optimizer.state.values()}
    assert steps == {4}  # 2 epochs of 4 + 3 rows
    shuffled, again, other_seed = (
        weights(trained("critic.shuffle=true", f"trainer.seed={seed}")) for seed in (3, 3, 4)
    )
    assert relative_error(again, shuffled) == 0.0
    assert relative_error(other_seed, shuffled) > 1e-4
    assert relative_error(weights(plain), shuffled) > 1e-4


def test_a_batch_without_values_changes_nothing(critic_path: str, run_dir: Path) -> None:
    engine = value_engine(critic_path, run_dir)
    batch = value_batch()
    before = weights(engine)
    metrics = engine.update(with_tokens(batch, loss_mask=torch.zeros_like(batch.tokens["loss_mask"])))
    assert metrics == {"critic/lr": 1e-2}
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(engine).items())


def test_round_trip(model_path: str, run_dir: Path) -> None:
    engine = value_engine(model_path, run_dir)
    batch = value_batch()
    engine.update(batch)
    target = run_dir / "critic" / "global_step_1"
    engine.save_pretrained(target, None)
    value_T = all_values(engine, batch)
    assert value_T.any()
    assert torch.equal(all_values(value_engine(str(target), run_dir), batch), value_T)
    config = AutoConfig.from_pretrained(target)
    assert (config.num_labels, config.architectures) == (1, ["Qwen2ForTokenClassification"])
    loaded, report = AutoModelForTokenClassification.from_pretrained(
        target, dtype=torch.float32, output_loading_info=True
    )
    assert type(loaded) is Qwen2ForTokenClassification
    assert not report["missing_keys"] and not report["unexpected_keys"]
    state = weights(engine)
    assert all(torch.equal(parameter, state[name]) for name, parameter in loaded.named_parameters())
    loaded.train()  # the saved config says that there is no dropout
    ids_L = batch.tokens["ids"][: int(batch.lengths_B[0])]
    after_L = loaded(input_ids=ids_L[None]).logits[0, :, 0].detach()
    mask_L = batch.tokens["loss_mask"][1 : len(ids_L)]
    torch.testing.assert_close(after_L[:-1][mask_L], value_T[1 : len(ids_L)][mask_L], atol=1e-5, rtol=0)


def test_a_loaded_critic_goes_on_from_there(critic_path: str, run_dir: Path) -> None:
    batch = value_batch()
    fresh = value_engine(critic_path, run_dir, "critic.optim.lr=0.005")
    engine = value_engine(critic_path, run_dir)
    engine.update(value_batch(seed=5))  # its moments would show in the next step
    engine.load_saved(Path(critic_path))
    engine.lr_factor = 0.5
    assert engine.update(batch) == fresh.update(batch)
    assert relative_error(weights(engine), weights(fresh)) == 0.0
    with pytest.raises(CheckpointError, match="model.safetensors"):
        engine.load_saved(run_dir / "absent")


@pytest.fixture(scope="module")
def two(critic_path: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], Path]:
    folder = tmp_path_factory.mktemp("two_critics")
    return value_cases.run_two_workers(critic_path, folder), folder


@pytest.fixture(scope="module")
def one(plain: ValueEngine, critic_path: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one worker finds: gradients by the number of rows; then values, the metrics of three updates, weights."""
    engine = value_engine(critic_path, tmp_path_factory.mktemp("one_critic"), *value_cases.MINI_BATCHES)
    batch = value_batch(12)
    return {
        "gradients": {num_rows: gradients(plain, value_batch(num_rows)) for num_rows in (1, 12)},
        "values": all_values(engine, batch),
        "metrics": [engine.update(batch) for _ in range(3)],
        "weights": weights(engine),
    }


def test_two_workers_equal_one(two: tuple[list[dict[str, Any]], Path], one: dict[str, Any]) -> None:
    ranks = two[0]
    for case, (num_rows, _) in value_cases.TWO_WORKER_CASES.items():
        assert all(relative_error(rank["gradients"][case], one["gradients"][num_rows]) < 1e-5 for rank in ranks)
    parts = [(rows, tokens["value"]) for rows, tokens in (rank["values"] for rank in ranks)]
    assert all(rows for rows, _ in parts) and sorted(parts[0][0] + parts[1][0]) == list(range(12))
    torch.testing.assert_close(merge_rows(value_batch(12).lengths_B, parts), one["values"], atol=2e-6, rtol=0)
    for step, mine in enumerate(one["metrics"]):
        assert ranks[0]["metrics"][step] == ranks[1]["metrics"][step] == pytest.approx(mine, rel=1e-3, abs=1e-4)
    assert relative_error(ranks[0]["weights"], one["weights"]) < 1e-3
    for rank in ranks:
        first, second = rank["repeated"]
        assert first == second == pytest.approx(ranks[0]["metrics"][0])
        assert rank["halved"] == 0.5 * first["critic/lr"]


def test_two_ranks_that_share_rows_equal_one(one: dict[str, Any], critic_path: str, tmp_path: Path) -> None:
    for rank in engine_workers.run(tmp_path, critic_path, "", 2, value_cases.share_rows):
        for case, (num_rows, _) in value_cases.TWO_WORKER_CASES.items():
            assert relative_error(rank["gradients"][case], one["gradients"][num_rows]) < 1e-5
        rows, tokens = rank["values"]
        assert rows == list(range(12))
        torch.testing.assert_close(tokens["value"], one["values"], atol=2e-6, rtol=0)
        assert rank["metrics"] == pytest.approx(one["metrics"][0], rel=1e-3, abs=1e-4)


def test_two_workers_save_one_model(two: tuple[list[dict[str, Any]], Path], critic_path: str) -> None:
    ranks, folder = two
    loaded = AutoModelForTokenClassification.from_pretrained(folder / "saved", dtype=torch.float32)
    assert all(torch.equal(parameter, ranks[0]["weights"][name]) for name, parameter in loaded.named_parameters())
    vocabulary = AutoTokenizer.from_pretrained(folder / "saved").get_vocab()
    assert vocabulary == AutoTokenizer.from_pretrained(critic_path).get_vocab()


def test_a_numerical_error_reaches_both_workers(two: tuple[list[dict[str, Any]], Path]) -> None:
    ranks, folder = two
    file = folder / "failures" / "critic" / "not_finite_step_7.pt"
    assert all("step 7: loss nan" in rank["message"] and str(file) in rank["message"] for rank in ranks)
    assert not torch.load(file)["tokens"]["returns"].isfinite().any()


def test_numbers_that_are_not_finite(critic_path: str, run_dir: Path) -> None:
    engine = value_engine(critic_path, run_dir)
    batch = value_batch()
    batch.tokens["returns"][selected_tokens(batch)[3]] = float("inf")
    before = weights(engine)
    with pytest.raises(NumericalError, match="step 1: loss inf"):
        engine.update(batch)
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(engine).items())
    with torch.no_grad():
        next(engine.model.parameters()).fill_(float("nan"))
    with pytest.raises(NumericalError, match="the critic's values are not finite"):
        engine.values(batch)


def test_models_that_cannot_be_a_critic(critic_path: str, run_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no config.json; set critic.model.path"):
        value_engine(str(tmp_path / "absent"), run_dir)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    Olmo2ForCausalLM(Olmo2Config(vocab_size=8, num_key_value_heads=1, **sizes)).save_pretrained(tmp_path / "olmo2")
    with pytest.raises(ConfigError, match="model type 'olmo2'; set critic.model.path"):
        value_engine(str(tmp_path / "olmo2"), run_dir)
    config = AutoConfig.from_pretrained(critic_path, num_labels=3)
    Qwen2ForTokenClassification(config).save_pretrained(tmp_path / "three")
    with pytest.raises(ConfigError, match="cannot load a value model from .*three"):
        value_engine(str(tmp_path / "three"), run_dir)


def test_other_settings_that_cannot_work(critic_path: str, run_dir: Path) -> None:
    with pytest.raises(ConfigError, match="fsdp_size is 3"):
        value_engine(critic_path, run_dir, "critic.model.fsdp_config.fsdp_size=3")
    batch = value_batch()
    del batch.tokens["returns"]
    with pytest.raises(ValueError, match="tokens\\['returns'\\]"):
        value_engine(critic_path, run_dir).update(batch)
