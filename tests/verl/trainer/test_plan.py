"""Plans: what work costs and how long engines sample, by hand; which layout is taken; the command."""

from __future__ import annotations

import gc
import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from run_config import run_config
from transformers import Qwen2Config

from verl.config import Config, check_supported
from verl.engine.files.loading import ModelShape, policy_shape
from verl.errors import ConfigError
from verl.phases import Phase
from verl.planning.dry_run.device import AtOnce, kv_cache_tokens
from verl.planning.dry_run.fake_device import FakeDevice, frozen_heap
from verl.planning.dry_run.machine import (
    COMPUTING,
    IN_NODE,
    NETWORK,
    Cost,
    Kept,
    Machine,
    machine_of,
    read_machine,
    write_machine,
)
from verl.planning.dry_run.passes import Operation, Work
from verl.planning.dry_run.place import GIB, GPUS, Groups, parse_gpus
from verl.planning.dry_run.report import FILLED
from verl.planning.dry_run.roles import Role, run_roles
from verl.planning.dry_run.run import Level
from verl.planning.plan import calibrate
from verl.planning.plan.layouts import Sharding, engine_sizes, least_bytes, shardings
from verl.planning.plan.measure import Measured
from verl.planning.plan.sampling import ASSUMED, STEPPING, Trajectories, expected_trajectories, sampling_cost
from verl.planning.plan.search import Machines, Planned, best_of, engine_settings, search, sending_weights
from verl.trainer.plan import main

H100 = next(gpu for gpu in GPUS if gpu.name == "H100")
HALF = machine_of(H100, Kept(0.5, 0.5, 0.5, 0.5, 1e-3))
ONE_COPY = ("trainer.layout=colocated", "actor_rollout_ref.actor.fsdp_config.fsdp_size=-1")
JUDGE = (
    *("reward.launch='python judge.py'", "reward.function=search_r1.rewards.composite.CompositeReward"),
    *("reward.kwargs={url: 'http://{server}/v1'}", "reward.n_gpus=2"),
)
GRPO = ("algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n_agent=5", "actor_rollout_ref.model.path=m")


def test_work_at_half_of_the_data_sheet() -> None:
    """A second of arithmetic and one of reading take two each; a small kernel its launch."""
    work = Work(
        [
            Operation(989e12, torch.bfloat16, 0),
            Operation(0.0, torch.bfloat16, 3_350_000_000_000),
            Operation(1.0, torch.bfloat16, 0),
        ],
        Counter({"all-gather": int(450e9 * 8 / 7), "all-reduce": int(50e9)}),
    )
    cost = HALF.cost(work, Groups(8, replicas=2))
    assert cost.parts == pytest.approx({COMPUTING: 4.001, IN_NODE: 2.0, NETWORK: 2.0})  # 2 x 1/2 of it at 25 GB/s
    assert cost.seconds == pytest.approx(4.001) and cost.bound_by == COMPUTING
    assert HALF.cost(work, Groups(8, replicas=2), share=0.25).seconds == pytest.approx(2.0)


def test_a_core_does_one_thing_after_the_other() -> None:
    """2 s of arithmetic, 1 s of memory, 0.5 s for each to begin; 12 GB sent at 2 GB/s, and 3 calls of 0.1 s."""
    core = Machine("core", 1e9, 1e9, 1e9, 2e9, 2e9, 0.5, "", call_s=0.1, overlap=False, rounds={"reduce-scatter": 1.5})
    operations = [Operation(2e9, torch.float32, 10**6), Operation(0.0, torch.float32, 10**9)]
    calls = Counter({"all-gather": 2, "reduce-scatter": 1})
    work = Work(operations, Counter({"all-gather": 4 * 10**9, "reduce-scatter": 8 * 10**9}), calls)
    cost = core.cost(work, Groups(4))
    assert cost.parts == pytest.approx({COMPUTING: 4.0, IN_NODE: (3 + 9) / 2 + 0.3, NETWORK: 0.0})
    assert cost.seconds == pytest.approx(4.0 + 6.3)
    assert core.cost(work, Groups(1)).seconds == pytest.approx(4.0), "a group of one sends nothing"


def test_costs_add_up_one_after_the_other() -> None:
    total = Cost(2.0, {COMPUTING: 2.0, NETWORK: 1.0}) + Cost(3.0, {NETWORK: 3.0}).times(2)
    assert (total.seconds, total.parts, total.bound_by) == (8.0, {COMPUTING: 2.0, NETWORK: 7.0}, NETWORK)


def test_sampling_by_hand() -> None:
    """8 engines of a GPU, 16 trajectories each at once: each iteration reads 2 GB of weights and half of the keys."""
    config = run_config([*GRPO, "actor_rollout_ref.rollout.dtype=bfloat16", "do_search=true",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1"])  # fmt: skip
    policy, place = ModelShape(10**9, 10, 1000, 4000, 500, None), parse_gpus("8xH100")
    of = Trajectories(number=128, tokens=1000.0, generated=200.0, longest=500, searches=2.0)
    assert kv_cache_tokens(config, policy, place) > 16 * 1000
    keys = 16 * 2 * 10 * 500 * 2 * 500
    iterations = 500 * ((2e9 + keys) / (3.35e12 / 2) + ASSUMED.iteration)
    context = 16 * 800 * 2e9 / (989e12 / 2)
    cost = sampling_cost(config, policy, place, HALF, of)
    assert cost.seconds == pytest.approx(iterations + context + 2 * ASSUMED.search)
    assert cost.parts[STEPPING] == pytest.approx(500 * ASSUMED.iteration) and cost.bound_by == STEPPING
    # Experts that are not chosen are read, and in no product.
    fewer = sampling_cost(config, replace(policy, num_unused=10**9 // 4), place, HALF, of)
    assert cost.seconds - fewer.seconds == pytest.approx(context / 4)


def test_a_trajectory_has_several_turns() -> None:
    """Two searches and a last turn, of 500 tokens each; a window of 1,100 tokens holds no more than itself."""
    sizes = ["data.max_prompt_length=4096", "data.max_response_length=500", "data.max_start_length=500", "max_turns=2"]
    of = expected_trajectories(run_config([*GRPO, *sizes, "do_search=true", "data.train_batch_size=512"]), 0.5)
    assert of == Trajectories(number=2560, tokens=2298.0, generated=750.0, longest=1500, searches=1.0)
    alone = ["algorithm.adv_estimator=reinforce", *sizes, "do_search=false"]
    one = expected_trajectories(run_config(alone), 0.5)
    assert (one.longest, one.generated, one.searches) == (500, 250.0, 0.0)
    small = ["data.max_prompt_length=600", "data.max_obs_length=500", *sizes[1:]]
    assert expected_trajectories(run_config([*GRPO, *small, "do_search=true"]), 0.5).longest == 1100


@pytest.mark.parametrize(
    ("way", "seconds"),
    [("auto", 0.08), ("objects", 1.0), ("broadcast", 0.08)],  # 2 GB: over a link of 25 GB/s, or at 2 GB/s
)
def test_weights_to_nodes_that_only_sample(way: str, seconds: float) -> None:
    """In a ring once, however many nodes there are; through the object store at its speed, or a share of the link."""
    rollout = "actor_rollout_ref.rollout"
    split = [*GRPO, "trainer.layout=split", "trainer.nnodes=2", f"{rollout}.weight_sync.between_nodes={way}"]
    few, many = (run_config([*split, f"{rollout}.nnodes={nodes}"]) for nodes in (2, 50))
    place = parse_gpus("4x8xH100")
    assert sending_weights(few, 10**9, place, HALF).parts == pytest.approx({NETWORK: seconds})
    assert sending_weights(many, 10**9, place, HALF).seconds == pytest.approx(4.0 if way == "objects" else seconds)
    assert sending_weights(run_config(GRPO), 10**9, place, HALF).seconds == 0.0


def test_copies_are_tried_on_several_nodes_alone() -> None:
    one, several = (run_config([*GRPO, f"trainer.nnodes={nodes}"]) for nodes in (1, 2))
    assert [(family[0].fsdp_size, family[0].checkpointing, family[0].offload) for family in shardings(one)][1:] == [
        (-1, False, False), (-1, False, True), (-1, True, False), (-1, True, True)
    ]  # fmt: skip
    found = [(family[0].sampling_nodes, family[0].fsdp_size) for family in list(shardings(several))[1::4]]
    assert found == [(0, -1), (0, 8), (1, -1)], "half of the nodes sample, and one is left to train"
    given, first, *_ = shardings(one)
    assert given == [Sharding.of(one, given=True)] and not given[0].settings and str(given[0]) == "as given"
    assert first[0] == Sharding(-1, False, False, 4 * 1024), "without offloading first, and the largest batches"


def test_what_cannot_fit_by_hand() -> None:
    """A thousand million parameters on eight GPUs at 16 bytes, and a tenth of them gathered at 2; 10 layers of 1,024
    tokens in bfloat16: their inputs, or four widths and three of the MLP.
    """
    policy = ModelShape(10**9, 10, 1000, 4000, 500, None)
    dynamic = [*GRPO, "actor_rollout_ref.actor.use_dynamic_bsz=true", "trainer.device=auto"]
    dynamic += ["actor_rollout_ref.actor.ppo_max_token_len_per_gpu=1024", "trainer.n_gpus_per_node=8"]
    recomputed = "actor_rollout_ref.model.enable_gradient_checkpointing"
    assert least_bytes(run_config([*dynamic, f"{recomputed}=true"]), policy) == 2.2e9 + 2 * 10 * 1024 * 1000
    assert least_bytes(run_config([*dynamic, f"{recomputed}=false"]), policy) == 2.2e9 + 2 * 10 * 1024 * 16_000
    assert least_bytes(run_config([*GRPO, "actor_rollout_ref.actor.use_dynamic_bsz=false"]), policy) == 0
    few = "actor_rollout_ref.model.trained_layers=1"
    assert least_bytes(run_config([*dynamic, few]), policy) == 0, "the other layers have no gradient and no moments"


def test_engines_divide_the_heads() -> None:
    """28 heads: an engine of eight GPUs could not divide them."""
    config = run_config([*GRPO, "trainer.device=auto", "trainer.n_gpus_per_node=8"])
    assert engine_sizes(config, ModelShape(1, 1, 1, 1, 1, None, num_heads=28)) == [1, 2, 4]
    assert engine_sizes(config, ModelShape(1, 1, 1, 1, 1, None, num_heads=16)) == [1, 2, 4, 8]


def test_a_simpler_layout_is_taken_unless_it_is_slower_by_more_than_3_percent() -> None:
    config = run_config(GRPO)

    def plan_of(engine: int, offload: bool, seconds: float, level: Level = "ok") -> Planned:
        sharding, room = Sharding(-1, offload, True, 1024), AtOnce(10, 1, 10, 10)
        return Planned(engine, sharding, config, level, "", room, [], 1.0, {Phase.UPDATE: Cost(seconds)}, {})

    small, large, off_loaded = plan_of(1, False, 102.9), plan_of(2, False, 100.0), plan_of(1, True, 101.0)
    assert best_of([large, off_loaded, small]) is small
    assert best_of([large, off_loaded, plan_of(1, False, 103.1)]) is off_loaded
    assert best_of([large, plan_of(1, True, 104.0)]) is large
    assert best_of([plan_of(1, False, 1.0, "warn"), plan_of(1, False, 1.0, "FAIL"), large]) is large, "that is ok"


def test_a_model_of_few_layers_stands_for_all(tmp_path: Path) -> None:
    """Parameters, products and what is sent are exact; the peaks are close."""
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 9, "vocab_size": 512}
    Qwen2Config(**sizes, num_attention_heads=2, num_key_value_heads=1).save_pretrained(tmp_path / "model")
    settings = [*GRPO[:2], f"actor_rollout_ref.model.path={tmp_path}/model", "trainer.n_gpus_per_node=2"]
    settings += ["actor_rollout_ref.model.enable_gradient_checkpointing=true", "data.train_batch_size=8"]
    settings += ["actor_rollout_ref.actor.ppo_mini_batch_size=40", "actor_rollout_ref.actor.use_kl_loss=true"]
    settings += ["trainer.device=auto", "actor_rollout_ref.actor.use_dynamic_bsz=true"]
    measured = Measured("cuda")
    [grown], [whole] = measured.roles(config := run_config(settings)), run_roles(config, "cuda")
    assert not measured.exact and grown.num_params == whole.num_params
    assert grown.idle.allocated == whole.idle.allocated
    for one, other in zip(grown.passes, whole.passes, strict=True):
        assert (one.name, one.times) == (other.name, other.times)
        assert one.work.flops == pytest.approx(other.work.flops) and one.work.sent == other.work.sent
        assert one.peak.allocated == pytest.approx(other.peak.allocated, rel=0.03)
        costs = [HALF.cost(work, grown.groups).seconds for work in (one.work, other.work)]
        assert costs[0] == pytest.approx(costs[1], rel=0.02)
    off = [f"actor_rollout_ref.actor.fsdp_config.{part}_offload=true" for part in ("param", "optimizer")]
    [off_loaded] = measured.roles(run_config([*settings, *off]))
    assert off_loaded.idle.allocated < grown.idle.allocated
    updates = [next(one for one in role.passes if one.phase is Phase.UPDATE) for role in (grown, off_loaded)]
    assert updates[0] is updates[1], "an update has all on the device, whatever is off-loaded in other phases"


def test_a_cpu_computes_a_model_of_few_layers_as_that_of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16, which it takes for 63 million parameters and not for the tenth of them that three layers have."""
    monkeypatch.setattr("verl.engine.device.runtime.cpu_has_bfloat16", lambda: True)
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 20, "vocab_size": 512}
    Qwen2Config(**sizes, num_attention_heads=4, num_key_value_heads=2).save_pretrained(tmp_path / "model")
    settings = [*GRPO[:2], f"actor_rollout_ref.model.path={tmp_path}/model"]
    measured = Measured("cpu")
    [grown], [whole] = measured.roles(config := run_config(settings)), run_roles(config, "cpu")
    assert not measured.exact and whole.num_params > 50_000_000
    for one, other in zip(grown.passes, whole.passes, strict=True):
        assert {operation.dtype for operation in one.work.operations} == {
            operation.dtype for operation in other.work.operations
        }
        assert one.peak.allocated == pytest.approx(other.peak.allocated, rel=0.03)


@pytest.mark.parametrize("trained", [1, 4])
def test_layers_that_are_added_are_frozen_where_the_last_ones_are_trained(trained: int, tmp_path: Path) -> None:
    """One, or more than a model of few layers has."""
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 8, "vocab_size": 512}
    Qwen2Config(**sizes, num_attention_heads=2, num_key_value_heads=1).save_pretrained(tmp_path / "model")
    settings = [*GRPO[:2], f"actor_rollout_ref.model.path={tmp_path}/model", "trainer.device=auto"]
    config = run_config([*settings, f"actor_rollout_ref.model.trained_layers={trained}"])
    measured = Measured("cuda")
    [grown], [whole] = measured.roles(config), run_roles(config, "cuda")
    assert not measured.exact and grown.idle.allocated == whole.idle.allocated
    assert (grown.num_params, grown.num_trained) == (whole.num_params, whole.num_trained)
    layer = 128 * (128 + 2 * 64) + 128 + 2 * 64 + 128 * 128 + 3 * 128 * 384 + 2 * 128
    assert whole.num_trained == trained * layer
    for one, other in zip(grown.passes, whole.passes, strict=True):
        assert (one.name, one.work.flops) == (other.name, pytest.approx(other.work.flops))


def test_an_anchor_that_an_update_does_not_read_may_wait_on_the_host(model: Path) -> None:
    """With the KL in the reward it is read before the update: with off-loading, the update has its bytes less."""
    settings = [*GRPO[:2], f"actor_rollout_ref.model.path={model}", "trainer.n_gpus_per_node=2", "trainer.device=auto"]
    settings += ["data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=40"]
    off = "actor_rollout_ref.ref.fsdp_config.param_offload=true"
    for kl, taken_away in (("algorithm.use_kl_in_reward=true", 1), ("actor_rollout_ref.actor.use_kl_loss=true", 0)):
        measured, peaks, num_params = Measured("cuda"), [], 0
        for more in ([], [off, "actor_rollout_ref.ref.log_probs=update"] if taken_away == 0 else [off]):
            [role] = measured.roles(run_config([*settings, kl, *more]))
            [update] = [one for one in role.passes if one.name == "update"]
            peaks.append(update.peak.allocated)
            num_params = role.num_params
        assert peaks[0] - peaks[1] == taken_away * 4 * num_params // 2, "float32, on two ranks"


def test_the_collector_passes_over_what_was_there_before_the_outermost_of_several_runs() -> None:
    gc.unfreeze()
    from_before: list[object] = []

    def passed_over() -> bool:
        return not any(one is from_before for one in gc.get_objects())

    with frozen_heap():
        assert passed_over()
        with FakeDevice("cuda").running(2):
            assert passed_over()
        assert passed_over(), "the next run need not look through it again"
    assert not passed_over() and gc.get_freeze_count() == 0


def test_a_critic_of_its_own_has_its_own_copy_on_each_node() -> None:
    own = ["actor_rollout_ref.model.path=m", "trainer.nnodes=2", "critic.n_gpus_per_node=2"]
    config = run_config(own)
    firsts = [family[0] for family in list(shardings(config))[1::4]]
    assert [(one.sampling_nodes, one.fsdp_size, one.critic) for one in firsts] == [(0, -1, 2), (0, 6, 2), (1, -1, 2)]
    copies = firsts[1]
    settings = ["critic.n_gpus_per_node=2", "critic.model.fsdp_config.fsdp_size=2"]
    assert {*settings, "actor_rollout_ref.actor.fsdp_config.fsdp_size=6"} <= {*copies.settings}
    assert str(copies).startswith("2 of a node for the critic, a copy on 6")
    placed = run_config([*own, *copies.settings])
    check_supported(placed)
    assert Sharding.of(placed) == copies


def test_a_machine_is_written_and_read(tmp_path: Path) -> None:
    write_machine(HALF, tmp_path / "machine.json")
    assert read_machine(tmp_path / "machine.json") == HALF
    (tmp_path / "machine.json").write_text('{"name": "core"}')
    with pytest.raises(ConfigError, match="verl.planning.plan.calibrate"):
        read_machine(tmp_path / "machine.json")
    write_machine(replace(HALF, link_bytes=0.0), tmp_path / "machine.json")
    with pytest.raises(ConfigError, match="link_bytes must be numbers above 0"):
        read_machine(tmp_path / "machine.json")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_this_machine_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rates that no core of any CPU is far from, and the slower number format is not the faster one by much."""
    assert calibrate.main(["--output", str(tmp_path / "machine.json"), "--device", "cpu"]) == 0
    machine = read_machine(tmp_path / "machine.json")
    assert 1e9 < machine.float_flops < 1e13 and 1e9 < machine.memory_bytes < 1e12
    assert 1e-7 < machine.launch_s < 1e-3 and 1e7 < machine.link_bytes < 1e11 and not machine.overlap
    assert machine.name in capsys.readouterr().out


def plan(model: Path | str, gpus: str, *overrides: str) -> tuple[str, ...]:
    data = ("data.train_files=train.parquet", "data.val_files=test.parquet", "data.train_batch_size=8")
    data += ("actor_rollout_ref.actor.ppo_mini_batch_size=40",)
    return ("--model", str(model), "--gpus", gpus, *GRPO[:2], *data, *overrides)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 1, "vocab_size": 512}
    Qwen2Config(**sizes, num_attention_heads=2, num_key_value_heads=1).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_the_command(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What it says to set is valid, and what the user has set stays."""
    engine = "actor_rollout_ref.rollout.tensor_model_parallel_size"
    picture = tmp_path / "plan.png"
    arguments = plan(model, "2x2xH100", f"{engine}=1", "--price", "2", "--png", str(picture))
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    settings = [line.strip(" \\") for line in printed.splitlines() if line.startswith("  ") and line.endswith("\\")]
    assert "trainer.nnodes=2" in settings and "trainer.n_gpus_per_node=2" in settings and f"{engine}=1" in settings
    run_config([*GRPO, *settings])
    assert "1,000 steps:" in printed and "at 2 a GPU hour (estimated)" in printed and "a copy on 2" in printed
    assert "as given" in printed and "no checkpointing" in printed and ", checkpointing" in printed
    assert re.search(r"a step: at least \d+ s, estimated \d+ s; not measured", printed)
    assert "1 node for sampling, one copy" in printed
    assert picture.read_bytes()[:4] == b"\x89PNG"


def test_nodes_of_one_gpu_have_engines_of_one(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(plan(model, "2x1xH100", *ONE_COPY)) == 0
    printed = capsys.readouterr().out
    assert "trainer.nnodes=2 " in printed and "rollout.tensor_model_parallel_size=1 " in printed


def test_what_binds_it_on_more_and_more_gpus(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The batch stays as it is: the last multiple up to 4,096 GPUs samples as many iterations as the first."""
    model = model.rename(tmp_path / "cost_$5_to_$10")  # in the title of the picture it is no formula
    assert main((*plan(model, "64x6xH100", *ONE_COPY), "--scaling", "--png", str(tmp_path / "plan.png"))) == 0
    table = capsys.readouterr().out.split("efficiency  bound by\n")[1].split("\n\n")[0]
    rows = [line.split(maxsplit=3) for line in table.splitlines()]
    assert [int(row[0]) for row in rows] == [384, 1536, 3840]
    assert {row[3] for row in rows} == {f"sample: {STEPPING}"}
    assert [row[2] for row in rows] == ["100%", "25%", "10%"]
    assert (tmp_path / "plan.png").stat().st_size > 10_000


@pytest.mark.parametrize("judge", [(), JUDGE])
def test_a_node_of_six_gpus_scales_to_nodes_of_six(
    model: Path, capsys: pytest.CaptureFixture[str], judge: tuple[str, ...]
) -> None:
    assert main((*plan(model, "6xH100", *ONE_COPY, *judge), "--scaling")) == 0
    table = capsys.readouterr().out.split("efficiency  bound by\n")[1].split("\n\n")[0]
    assert [int(line.split()[0]) for line in table.splitlines()] == [6, 24, 96, 384, 1536, 4092]


def test_a_plan_for_cores(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By what was measured; nothing is offloaded, and engines are processes."""
    core = Machine("core", 1e11, 5e10, 1e10, 1e9, 1e9, 5e-6, "measured on a Tuesday", 1e-4, overlap=False)
    write_machine(core, tmp_path / "machine.json")
    assert main((*plan(model, "1x2xCPU"), "--machine", str(tmp_path / "machine.json"))) == 0
    printed = capsys.readouterr().out
    assert "core hours" in printed and "measured on a Tuesday" in printed and "no offload" in printed
    assert "1 core an engine" in printed and ", offload" not in printed


def test_a_critic_of_its_own_works_beside_the_actor(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each phase the slower role's time counts, and of the links what the rank that sends more there sends."""
    own = ("algorithm.adv_estimator=gae", "critic.n_gpus_per_node=1", f"critic.model.path={model}")
    settings = [f"actor_rollout_ref.model.path={model}", "data.train_files=a.parquet", "data.val_files=b.parquet", *own]
    settings += ["data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=8"]
    settings += ["trainer.n_gpus_per_node=3", *engine_settings(1)]

    def load(more: Sequence[str]) -> Config:
        return run_config([*settings, *more])

    roles: list[Role] = []

    def noted(config: Config, kind: str, phases: Collection[Phase]) -> list[Role]:
        roles.extend(run_roles(config, kind, phases))
        return roles

    monkeypatch.setattr("verl.planning.plan.measure.run_roles", noted)
    place, machines = parse_gpus("1x3xH100"), Machines(HALF, HALF)
    found = next(search(load, place, policy_shape(load([])), machines, Measured("cuda"), lambda _: None))
    actor, critic = roles
    assert (actor.groups.shard, critic.groups.shard) == (2, 1)

    def seconds(role: Role, phase: Phase) -> float:
        passes = [one for one in role.passes if one.phase is phase]
        return sum(HALF.cost(one.work, role.groups, FILLED).seconds * max(1.0, one.times) for one in passes)

    for phase in (Phase.SCORE, Phase.UPDATE):
        of_roles = [seconds(role, phase) for role in (actor, critic)]
        assert min(of_roles) > 0 and found.costs[phase].seconds == pytest.approx(max(of_roles))
    sent = [sum(sum(one.work.sent.values()) * max(1.0, one.times) for one in role.passes) for role in (actor, critic)]
    assert found.sent["in node"] == pytest.approx(max(sent))


@pytest.mark.slow  # how such a layout is counted and set is seen above
def test_a_plan_with_a_critic_of_its_own(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On nodes of another size than the settings' default, and with all GPUs in the price."""
    more = ("algorithm.adv_estimator=gae", "critic.n_gpus_per_node=1", "--steps", "3600")
    assert main((*plan(model, "1x3xH100"), *more)) == 0
    printed = capsys.readouterr().out
    settings = [line.strip(" \\") for line in printed.splitlines() if line.startswith("  ") and line.endswith("\\")]
    assert "trainer.n_gpus_per_node=3" in settings
    assert "1 of a node for the critic, one copy" in printed
    run_config(["actor_rollout_ref.model.path=m", *settings])
    hours, gpu_hours = (float(text.split()[0]) for text in printed.split("steps: ")[1].split(" h, "))
    assert gpu_hours == pytest.approx(3 * hours, abs=0.7)


@pytest.mark.slow  # that what the user has set stays is seen in the command above
def test_the_user_s_layout_stays(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(plan(model, "2x2xH100", *ONE_COPY)) == 0
    printed = capsys.readouterr().out
    assert "for sampling" not in printed and "a copy on" not in printed


def test_a_script_s_settings_may_change_and_the_user_s_stay(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The model is the script's, and the number of GPUs; the script's share of a GPU and its engines are not kept."""
    share, engine = (
        "actor_rollout_ref.rollout.gpu_memory_utilization",
        "actor_rollout_ref.rollout.tensor_model_parallel_size",
    )
    words = [
        *plan("", "")[4:],
        f"actor_rollout_ref.model.path={model}",
        "trainer.n_gpus_per_node=2",
        "trainer.nnodes=1",
    ]
    words += [f"{share}=0.01", f"{engine}=2", "actor_rollout_ref.actor.fsdp_config.param_offload=true"]
    assert main([*words, "--", "actor_rollout_ref.actor.fsdp_config.param_offload=false", "--steps", "10"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"{model} (0.0 B) on 1x2xH100\n") and "\n10 steps: " in printed
    assert f"{share}=0.9 " in printed and f"{engine}=1 " in printed, "0.01 of a GPU has no room for a sequence"
    assert "param_offload=true" not in printed.replace("critic.model.fsdp_config.param_offload=true", "")
    with pytest.raises(SystemExit):
        main([*words, "--", "steps"])
    assert "not understood: steps" in capsys.readouterr().err


def test_settings_as_the_trainer_takes_them(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From a file in a folder of one's own, where `~key` gives a setting its default again."""
    (tmp_path / "mine.yaml").write_text("defaults: [ppo_trainer, _self_]\nmax_turns: -1\n")
    given = [*plan(model, "4xCPU"), "-cd", str(tmp_path), "-cn", "mine"]
    assert main(given) == 1 and "max_turns: must be at least 0" in capsys.readouterr().out
    assert main([*given, "~max_turns"]) == 1 and "add --machine machine.json" in capsys.readouterr().out


def test_two_kinds_of_gpu_give_a_range(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """80 GB may be an A100 or an H100: the floor is the faster one's, the estimate the slower one's."""
    assert main(plan(model, "8x80", *ONE_COPY, "trainer.n_gpus_per_node=8")) == 0
    printed = capsys.readouterr().out
    assert "estimate (A100): " in printed and "floor (H100): all of the data sheet's rates" in printed


@pytest.mark.parametrize(
    ("name", "memory", "title", "floor"),
    [
        ("NVIDIA A100-SXM4-80GB", 79.1, "on 1x2xA100\n", "A100"),
        ("NVIDIA A100-SXM4-40GB", 39.4, "on 1x2xA100-40\n", "A100-40"),
        ("NVIDIA GeForce RTX 4090", 23.6, "on 1x2x24 GiB\n", "H100"),
    ],
)
def test_without_gpus_the_plan_is_for_those_of_this_machine(
    name: str,
    memory: float,
    title: str,
    floor: str,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = SimpleNamespace(name=name, total_memory=int(memory * GIB))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    options, _, _, *rest = plan(model, "", *ONE_COPY, "trainer.n_gpus_per_node=2")
    assert main([options, str(model), *rest[1:]]) == 0
    printed = capsys.readouterr().out
    assert title in printed and f"of {memory} GiB at the peak" in printed and f"floor ({floor}): " in printed


@pytest.mark.parametrize(
    ("gpus", "message"),
    [
        ("some", "--gpus some is not understood"),
        ("4xCPU", "add --machine machine.json"),
    ],
)
def test_gpus_that_no_plan_is_made_for(
    gpus: str, message: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(plan(model, gpus)) == 1 and message in capsys.readouterr().out
