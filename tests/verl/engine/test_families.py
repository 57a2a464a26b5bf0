"""Each family of docs/models.md in the engine of training: rows that are computed together are what each is alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cut_rollouts import batch_of, cut, rollouts
from engine_cases import CPU, make_batch, make_engine, relative_error
from families import DELTA_NETS, FAMILIES, write_family
from test_sequences import ALL_CUT, SOME_CUT, TURNS, both, in_float64, loss_and_gradient

from verl.engine.batching import PackedRows
from verl.engine.policy_engine import PolicyEngine
from verl.protocol import TrainBatch

# transformers computes rotary embeddings, some norms and the delta rule in float32, whatever the model's format is.
CLOSE = 1e-5
LOSS = ("actor_rollout_ref.actor.loss_agg_mode=token-mean",)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, PolicyEngine]:
    return {name: engine_of(name, tmp_path_factory.mktemp("family")) for name in FAMILIES}


def engine_of(name: str, folder: Path, *overrides: str) -> PolicyEngine:
    """In float64, but for experts, whose grouped product PyTorch has in float32 at most."""

    def make() -> PolicyEngine:
        return make_engine(str(folder / "model"), folder, *LOSS, *overrides)

    write_family(name, folder / "model")
    made: PolicyEngine = make() if "num_experts" in FAMILIES[name].settings else in_float64(make)
    return made


def log_probs(engine: PolicyEngine, batch: TrainBatch) -> torch.Tensor:
    return engine.log_probs(batch, 1.0).tokens["log_prob"]


@pytest.mark.parametrize("name", FAMILIES)
def test_rows_together_are_each_row_alone(name: str, engines: dict[str, PolicyEngine]) -> None:
    engine, batch = engines[name], make_batch(7)
    assert engine.layout.packed is engine.layout.share_prefixes is FAMILIES[name].packed
    together = log_probs(engine, batch)
    alone = torch.cat([log_probs(engine, batch.select([row])) for row in range(len(batch))])
    torch.testing.assert_close(together, alone, rtol=0, atol=CLOSE)
    assert together.std() > 0.3


@pytest.mark.parametrize("name", FAMILIES)
def test_the_gradient_is_that_of_rows_one_by_one(name: str, engines: dict[str, PolicyEngine], tmp_path: Path) -> None:
    one_by_one = (
        "actor_rollout_ref.model.use_remove_padding=false",
        "actor_rollout_ref.actor.use_dynamic_bsz=false",
        "actor_rollout_ref.actor.ppo_micro_batch_size=1",
    )
    batch = make_batch(7)
    loss, gradient = loss_and_gradient(engines[name], batch)
    expected, of_rows = loss_and_gradient(engine_of(name, tmp_path, *one_by_one), batch)
    assert loss == pytest.approx(expected, rel=CLOSE) and expected
    assert relative_error(gradient, of_rows) < CLOSE


@pytest.mark.parametrize("name", FAMILIES)
def test_sequences_of_a_rollout_train_what_one_does(name: str, engines: dict[str, PolicyEngine]) -> None:
    """They begin alike: shared where attention can read another row's keys, computed again where a state cannot."""
    for cuts in (ALL_CUT, SOME_CUT):
        whole, pieces = both(cuts)
        (expected, gradient), (found, of_pieces) = (loss_and_gradient(engines[name], one) for one in (whole, pieces))
        assert found == pytest.approx(expected, rel=CLOSE) and relative_error(of_pieces, gradient) < CLOSE


@pytest.mark.parametrize("name", DELTA_NETS)
def test_a_state_never_runs_from_row_to_row(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What packing would do: transformers' own delta rule takes no notice of where rows begin."""
    engine = engine_of(name, tmp_path)
    said = [record.message for record in caplog.records if "rows are padded" in record.message]
    assert len(said) == 1 and "layers of linear attention" in said[0]
    batch = batch_of([cut(one, {0}) for one in rollouts(TURNS)])
    ids_T, plain = batch.tokens["ids"], write_family(name, tmp_path / "plain")
    position_T = torch.cat([torch.arange(length) for length in batch.lengths_B.tolist()])
    boundaries = PackedRows.of(batch.lengths_B.tolist(), CPU).attention_arguments()
    plain.set_attn_implementation("varlen")
    with torch.no_grad():
        logits_TV = plain(ids_T[None], position_ids=position_T[None], use_cache=False, **boundaries).logits[0]
    packed_T = logits_TV[:-1].log_softmax(-1).gather(1, ids_T[1:, None])[:, 0]
    error_T = (packed_T - log_probs(engine, batch)[1:]).abs()
    trained_T, first_T = batch.tokens["loss_mask"][1:], batch.row_of_token_T[1:] == 0
    assert error_T[trained_T & first_T].max() < CLOSE
    assert error_T[trained_T & ~first_T].max() > 0.01


def test_the_table_of_the_docs_is_what_is_tried() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "models.md").read_text()
    expected = [
        [
            name,
            f"`{family.model_type}`",
            "packed" if family.packed else "padded",
            "yes" if family.sampled else "no",
            f"`{family.tokenizer[1]}`" if family.tokenizer else "not tried",
        ]
        for name, family in FAMILIES.items()
    ]
    first = page.partition("\n## ")[0].splitlines()  # the table before the sections about LoRA and long contexts
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in first if line.startswith("|")]
    assert rows[2:] == expected
