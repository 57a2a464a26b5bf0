"""A dry run against what PyTorch really allocated, against sums worked out by hand, and as a command."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from measured_allocations import measure, measure_rank
from run_config import run_config
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3MoeConfig

from verl.config import Config
from verl.config.rules.placement import RoleName
from verl.config.sections.model import OptimConfig
from verl.engine.learner import build_adamw, make_moments
from verl.errors import ConfigError
from verl.phases import Phase
from verl.planning.dry_run.device import device_phases
from verl.planning.dry_run.fake_device import frozen_heap
from verl.planning.dry_run.learned import Learned
from verl.planning.dry_run.machine import machine_of
from verl.planning.dry_run.memory import Peak, Segments
from verl.planning.dry_run.passes import Operation, Work
from verl.planning.dry_run.place import GIB, GPUS, Groups, Place, located, parse_gpus, rank_groups
from verl.planning.dry_run.report import PROMISED, least_seconds_of_step, report
from verl.planning.dry_run.roles import Pass, Role, run_role, run_roles
from verl.planning.dry_run.run import dry_run, three_settings
from verl.protocol import TrainBatch
from verl.trainer.dry_run import main

ACTOR, CRITIC = "actor_rollout_ref.actor", "critic"
VOCABULARY = 1024
WINDOW = 552  # tokens: max_prompt_length + max_response_length of configs/tinywiki.yaml
PACKED = 1280  # tokens of a micro-batch where a real one is measured
ROWS = [f"{place}.use_dynamic_bsz=false" for place in (ACTOR, CRITIC)]
GAE = ["algorithm.adv_estimator=gae", f"{CRITIC}.ppo_micro_batch_size=8"]
FOUR = ["data.train_batch_size=4", f"{ACTOR}.ppo_mini_batch_size=4"]
REDUCED_ONCE = f"{ACTOR}.fsdp_config.reduce_gradients=mini_batch"
CHECKPOINTING = "actor_rollout_ref.model.enable_gradient_checkpointing=true"
TINYWIKI = {"vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 3}
SMALL = TINYWIKI | {"num_hidden_layers": 1}  # for what does not depend on layers: tracing takes a second for each
TWO_LAYERS = TINYWIKI | {"num_hidden_layers": 2}
WIDE = {"vocab_size": VOCABULARY, "hidden_size": 320, "intermediate_size": 768, "num_hidden_layers": 4}
MODEL_200M = {"vocab_size": 32768, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8}


@pytest.fixture(autouse=True)
def heap_of_other_tests() -> Iterator[None]:
    """What other tests have left is not searched for garbage at the beginning of each dry run."""
    with frozen_heap():
        yield


def overrides_of(model: Path, *overrides: str) -> list[str]:
    """A TinyWiki run of 16 trajectories a step, in one mini-batch."""
    return [
        "data.train_files=train.parquet",
        "data.val_files=test.parquet",
        f"actor_rollout_ref.model.path={model}",
        f"trainer.default_local_dir={model.parent}/run",
        "data.train_batch_size=16",
        "actor_rollout_ref.rollout.n_agent=1",
        f"{ACTOR}.ppo_mini_batch_size=16",
        "algorithm.adv_estimator=reinforce",
        *overrides,
    ]


def full_rows(lengths: list[int]) -> TrainBatch:
    """Rows of these lengths with random numbers; every token is trained."""
    num_tokens = sum(lengths)
    names = ("advantages", "old_log_probs", "ref_log_probs", "rollout_log_probs", "values", "returns")
    tokens = {name: torch.randn(num_tokens) for name in names}
    tokens |= {
        "ids": torch.randint(0, VOCABULARY, (num_tokens,)),
        "loss_mask": torch.ones(num_tokens, dtype=torch.bool),
        "top_index": torch.randint(0, VOCABULARY, (num_tokens, 8), dtype=torch.int32),
    }
    return TrainBatch(torch.tensor(lengths), tokens)


def save_model(folder: Path, sizes: dict[str, int]) -> Path:
    config = Qwen2Config(**sizes, num_attention_heads=4, num_key_value_heads=4, tie_word_embeddings=True)
    Qwen2ForCausalLM(config).save_pretrained(folder / "model")
    return folder / "model"


def actor_of(overrides: list[str], kind: str, *phases: Phase) -> Role:
    """The actor of a run, of which these phases are measured."""
    return run_role("actor", run_config(overrides, "tinywiki"), kind, phases)


def pass_of(role: Role, name: str) -> Pass:
    return next(one for one in role.passes if one.name == name)


def peaks(roles: list[Role]) -> dict[str, int]:
    """Bytes by pass, as `measure` has them."""
    passes = {one.name: one.peak.allocated for role in roles for one in role.passes}
    return passes | {role.name: role.idle.allocated for role in roles}


SCORE = [f"{ACTOR}.use_rollout_log_probs=false", f"{ACTOR}.old_log_probs=score"]
SAMPLED_KL = f"{ACTOR}.kl_loss_type=low_var_kl"


@pytest.mark.parametrize(
    ("settings", "passes"),
    [
        (SCORE, {"log-probs", "update"}),
        ([f"{ACTOR}.kl_topk_tokens=8"], {"update"}),
        pytest.param(
            [*SCORE, SAMPLED_KL, "actor_rollout_ref.ref.log_probs=score"],
            {"log-probs", "anchor's log-probs", "update"},
            marks=pytest.mark.slow,
        ),
        pytest.param([SAMPLED_KL], {"update"}, marks=pytest.mark.slow),
    ],
)
def test_the_peak_is_what_torch_allocates(settings: list[str], passes: set[str], tmp_path: Path) -> None:
    """A model and its anchor, two micro-batches; without other settings the KL is exact."""
    assert measured(overrides_of(save_model(tmp_path, TWO_LAYERS), *settings), tmp_path) == passes | {"actor"}


def measured(overrides: list[str], folder: Path) -> set[str]:
    """The passes of a real rank, of which each has the peak that the dry run says."""
    given = [*overrides, f"{ACTOR}.ppo_max_token_len_per_gpu={PACKED}"]
    rows = full_rows(([WINDOW] * 2 + [PACKED - 2 * WINDOW]) * 2)
    real = measure_rank(given, rows, 0, 1, folder)
    require_same_peaks(run_roles(run_config(given, "tinywiki"), "cpu"), real)
    return {*real}


def require_same_peaks(roles: list[Role], real: dict[str, int]) -> None:
    dry = peaks(roles)
    print({name: (dry[name], real[name]) for name in real})
    assert {name: dry[name] for name in real} == pytest.approx(real, rel=0.05)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("sizes", "num_ranks", "overrides"),
    [
        (TINYWIKI, 2, [f"{ACTOR}.ppo_micro_batch_size=8", f"{ACTOR}.kl_topk_tokens=8"]),
        (TINYWIKI, 2, [f"{ACTOR}.ppo_micro_batch_size=8", SAMPLED_KL, REDUCED_ONCE]),
        (WIDE, 1, [f"{ACTOR}.ppo_micro_batch_size=8", CHECKPOINTING, f"{ACTOR}.old_log_probs=score"]),
        (WIDE, 1, [f"{ACTOR}.ppo_micro_batch_size=8", f"{ACTOR}.use_kl_loss=false", *GAE]),
        (MODEL_200M, 1, [f"{ACTOR}.ppo_micro_batch_size=2", *FOUR]),
    ],
)
def test_more_peaks(sizes: dict[str, int], num_ranks: int, overrides: list[str], tmp_path: Path) -> None:
    """Settings that nothing was fitted to."""
    model = save_model(tmp_path, sizes)
    given = overrides_of(model, SCORE[0], f"critic.model.path={model}", *ROWS, *overrides)
    rows = 4 if sizes is MODEL_200M else 16
    real = measure(given, full_rows([WINDOW] * rows), num_ranks, tmp_path)
    require_same_peaks(run_roles(run_config([*given, f"trainer.n_gpus_per_node={num_ranks}"], "tinywiki"), "cpu"), real)


def test_a_rank_of_many_by_hand(tmp_path: Path) -> None:
    """Shards, gathers and products of a model without weights, as rank 0 of 64."""
    layers, width, mlp, ranks, tokens = 2, 64, 128, 64, 2 * WINDOW
    sizes = {"vocab_size": 512, "hidden_size": width, "intermediate_size": mlp, "num_hidden_layers": layers}
    config = Qwen2Config(**sizes, num_attention_heads=4, num_key_value_heads=4, tie_word_embeddings=False)
    config.save_pretrained(tmp_path / "model")
    overrides = [
        *overrides_of(tmp_path / "model", *ROWS, f"{ACTOR}.kl_loss_type=low_var_kl"),
        f"{ACTOR}.ppo_micro_batch_size=128",
        "data.train_batch_size=256",
        f"{ACTOR}.ppo_mini_batch_size=256",
        *SCORE,
        "actor_rollout_ref.rollout.log_prob_micro_batch_size=128",
        f"{ACTOR}.fsdp_config.mixed_precision.param_dtype=bfloat16",
        f"trainer.n_gpus_per_node={ranks}",
    ]
    actor = actor_of(overrides, "cpu", Phase.SCORE, Phase.UPDATE)
    layer = width * (3 * width + width + 3 * mlp) + 3 * width + 2 * width  # q, k, v, o, MLP; biases; norms
    params = 2 * 512 * width + layers * layer + width
    assert actor.num_params == params
    assert actor.idle.allocated == pytest.approx(16 * params / ranks, rel=0.02)  # and two moments, and the anchor
    score = pass_of(actor, "log-probs")
    assert score.work.sent["all-gather"] == pytest.approx(2 * params, rel=0.01)  # each unit once, in bfloat16
    weights = layers * (layer - 5 * width) + 512 * width
    attention = layers * 2 * tokens * WINDOW * width
    assert score.work.flops == pytest.approx(2 * tokens * weights + attention, rel=0.01)
    assert score.times == 256 / (2 * ranks)
    update = pass_of(actor, "update")
    assert update.work.sent["reduce-scatter"] == pytest.approx(2 * 4 * params, rel=0.01)  # two micro-batches, float32


def adapted(folder: Path, sizes: dict[str, int], *overrides: str) -> list[str]:
    lora = ["actor_rollout_ref.model.lora_rank=8", "algorithm.ref_policy_ema_tau=1"]
    return overrides_of(save_model(folder, sizes), f"{ACTOR}.use_rollout_log_probs=false", *lora, *overrides)


def test_the_peak_with_adapters_is_what_torch_allocates(tmp_path: Path) -> None:
    """An exact KL to the policy's own base."""
    measured(adapted(tmp_path, TWO_LAYERS), tmp_path)


def test_adapters_by_hand(tmp_path: Path) -> None:
    """A frozen base in bfloat16 and adapters with two moments: no gradient, no moments and no anchor of the base."""
    overrides = adapted(tmp_path, SMALL, "trainer.device=auto")
    actor = actor_of(overrides, "cuda")
    width, mlp, rank = 128, 384, 8
    adapters = rank * (4 * 2 * width + 3 * (width + mlp))
    assert actor.num_adapted == actor.num_trained == adapters
    assert actor.idle.allocated == pytest.approx(2 * actor.num_params + 12 * adapters, rel=0.03)
    whole = actor_of([*overrides, "actor_rollout_ref.model.lora_rank=0"], "cuda")
    assert whole.num_params == actor.num_params and not whole.num_adapted
    assert whole.idle.allocated == pytest.approx(16 * whole.num_params, rel=0.03)  # and the anchor


@pytest.mark.parametrize(("once", "shards"), [(False, 16), (False, 4), (True, 4)])
def test_reductions_of_a_step_by_hand(once: bool, shards: int, tmp_path: Path) -> None:
    """Two mini-batches of four micro-batches, float32: shards are reduced eight times or twice, replicas twice."""
    model = save_model(tmp_path, SMALL)
    sizes = ["data.train_batch_size=256", f"{ACTOR}.ppo_mini_batch_size=128", f"{ACTOR}.ppo_micro_batch_size=32", *ROWS]
    how = [f"{ACTOR}.fsdp_config.fsdp_size={shards}", "trainer.n_gpus_per_node=16", *([REDUCED_ONCE] if once else [])]
    actor = actor_of(overrides_of(model, *sizes, *how), "cpu", Phase.UPDATE)
    update = pass_of(actor, "update")
    sent = {kind: update.times * num_bytes for kind, num_bytes in update.work.sent.items()}
    assert sent["reduce-scatter"] == pytest.approx((2 if once else 8) * 4 * actor.num_params, rel=0.02)
    between = 2 * 4 * actor.num_params / shards if shards < 16 else 0.0
    assert sent["all-reduce"] == pytest.approx(between, rel=0.02, abs=1e4)


def test_thousands_of_ranks(tmp_path: Path) -> None:
    """More ranks than rows of a weight: most shards are empty, rank 0 has one row of each."""
    width = 64
    sizes = {"vocab_size": 512, "hidden_size": width, "intermediate_size": 128, "num_hidden_layers": 1}
    config = Qwen2Config(**sizes, num_attention_heads=4, num_key_value_heads=4, tie_word_embeddings=True)
    config.save_pretrained(tmp_path / "model")
    overrides = [
        *overrides_of(tmp_path / "model", f"{ACTOR}.use_kl_loss=false", "trainer.nnodes=512"),
        "algorithm.ref_policy_ema_tau=1",
        "trainer.n_gpus_per_node=8",
        "data.train_batch_size=4096",
        f"{ACTOR}.ppo_mini_batch_size=4096",
    ]
    actor = actor_of(overrides, "cuda", Phase.UPDATE)
    rows = width * 5 + 128 + 5 + 2  # of the matrices; of the biases and norms one value each
    assert actor.num_params == 512 * width + width * (4 * width + 3 * 128) + 3 * width + 3 * width
    assert actor.idle.allocated <= 16 * rows * width
    update = pass_of(actor, "update")
    assert update.times == 1.0  # one row of each rank is all there is
    assert update.work.sent["all-gather"] >= 2 * 2 * actor.num_params  # forward and backward, bfloat16


def test_what_is_looked_up_is_what_pytorch_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same peaks and the same work, operation by operation, as when every operation is asked for."""
    overrides = [*overrides_of(save_model(tmp_path, SMALL), CHECKPOINTING, f"{ACTOR}.kl_topk_tokens=8"),
                 f"{ACTOR}.fsdp_config.param_offload=true", "trainer.n_gpus_per_node=2"]  # fmt: skip
    [quick] = run_roles(run_config(overrides, "tinywiki"), "cuda")
    [again] = run_roles(run_config(overrides, "tinywiki"), "cuda")
    assert again == quick, "nor does it depend on what runs before it have learned"
    monkeypatch.setattr(Learned, "key", lambda *_: None)
    [asked] = run_roles(run_config(overrides, "tinywiki"), "cuda")
    assert asked == quick


def test_shards_of_copies_are_not_strided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's own look for strided shards, which a dry run leaves out, changes nothing in any layout of ranks."""
    model = save_model(tmp_path, SMALL)
    for copies in ("1", "2", "-1"):
        config = run_config([*overrides_of(model), f"{ACTOR}.fsdp_config.fsdp_size={copies}",
            "trainer.n_gpus_per_node=4"], "tinywiki")  # fmt: skip
        without = run_roles(config, "cuda")
        with monkeypatch.context() as patch:
            patch.setattr("verl.planning.dry_run.fake_device.no_strided_shards", contextlib.nullcontext)
            assert run_roles(config, "cuda") == without


def test_split_devices(tmp_path: Path) -> None:
    """Of eight GPUs two sample, and six train: neither has what the other needs."""
    split = ["trainer.layout=split", "trainer.rollout_gpus_per_node=2", "trainer.n_gpus_per_node=8"]
    config = run_config(overrides_of(save_model(tmp_path, SMALL), "trainer.device=auto", *split), "tinywiki")
    found = dry_run(config, parse_gpus("8x80"))
    assert [(phase.phase, phase.device) for phase in found.phases] == [
        ("sample", "samples"), ("score", "trains"), ("update", "trains"), ("sync", "trains")
    ]  # fmt: skip
    sampling, *training = found.phases
    share = config.actor_rollout_ref.rollout.gpu_memory_utilization
    assert sampling.parts == {"engine": share * parse_gpus("8x80").memory}
    assert not any("engine" in phase.parts for phase in training)
    [actor] = found.roles
    assert actor.idle.allocated == pytest.approx(16 * actor.num_params / 6, rel=0.03)  # and the anchor
    assert "2 of each node sample (2 engines of 1), 6 train" in found.report
    with pytest.raises(ConfigError, match="rollout_gpus_per_node"):
        dry_run(config, parse_gpus("2x80"))  # none would be left to train


def own_critic(folder: Path, *overrides: str) -> list[str]:
    """Of eight GPUs two are the critic's."""
    model = save_model(folder, SMALL)
    critic = [f"critic.model.path={model}", "critic.n_gpus_per_node=2", "trainer.n_gpus_per_node=8"]
    return overrides_of(model, "algorithm.adv_estimator=gae", "trainer.device=auto", *critic, *overrides)


LARGE = ["data.train_batch_size=64", f"{ACTOR}.ppo_mini_batch_size=64"]
JUDGE = [
    *("reward.launch='python judge.py'", "reward.function=search_r1.rewards.composite.CompositeReward"),
    *("reward.kwargs={url: 'http://{server}/v1'}", "trainer.device=auto", "trainer.n_gpus_per_node=8"),
]


@pytest.mark.parametrize(
    ("gpus", "server", "nodes"),
    [
        ("8x80", 2, (1, 6)),
        ("10x80", 2, (1, 8)),
        ("1x8x80", 2, (1, 6)),
        ("2x8x80", 1, (2, 7)),  # 14 are more than the 8 of one node
        ("2x8x80", 6, (1, 8)),  # and 4 less
        ("2x8x80", 4, (1, 8)),  # as many, without a network between them
        ("2x8x80", 8, (1, 8)),
        ("3x8x80", 8, (2, 8)),
        ("3x8x80", 0, (3, 8)),
        ("4xCPU", 2, (1, 4)),  # the server's GPUs are elsewhere
    ],
)
def test_the_gpus_of_a_judge_are_none_of_the_roles(gpus: str, server: int, nodes: tuple[int, int]) -> None:
    config = run_config(overrides_of(Path("model"), *JUDGE, f"reward.n_gpus={server}"), "tinywiki")
    trainer = located(config, parse_gpus(gpus)).trainer
    assert (trainer.nnodes, trainer.n_gpus_per_node) == nodes


@pytest.mark.parametrize(
    ("server", "layout", "gpus"),
    [
        (1, ("tensor_model_parallel_size=2",), 8),  # engines of two cannot divide the seven that each node has left
        (2, ("nnodes=1", "n_gpus_per_node=6"), 8),  # the other node samples on six, and has two left
        (6, ("nnodes=1",), 2),  # one node trains, the other samples
    ],
)
def test_a_judge_is_where_the_layout_of_the_roles_leaves_room(server: int, layout: tuple[str, ...], gpus: int) -> None:
    """On two nodes, of which one trains."""
    rollout = [f"actor_rollout_ref.rollout.{setting}" for setting in layout]
    rollout += ["trainer.layout=split"] if "nnodes=1" in layout else []
    config = run_config(overrides_of(Path("model"), *JUDGE, *rollout, f"reward.n_gpus={server}"), "tinywiki")
    trainer = located(config, parse_gpus("2x8x80")).trainer
    assert (trainer.nnodes, trainer.n_gpus_per_node) == (1, gpus)


def test_a_judge_that_leaves_no_gpu_is_refused_and_one_that_does_is_reported(tmp_path: Path) -> None:
    def config_of(server: int, *more: str) -> Config:
        return run_config(overrides_of(tmp_path, *JUDGE, f"reward.n_gpus={server}", *more), "tinywiki")

    for gpus in ("8x80", "1x8x80"):
        with pytest.raises(ConfigError, match=r"reward\.n_gpus=8 .* of 8: none is left"):
            located(config_of(8), parse_gpus(gpus))
    for gpus in ("2x8x80", "24x80"):
        with pytest.raises(ConfigError, match=r"reward\.n_gpus=9: .* GPUs of one node, and a node has 8: lower it"):
            located(config_of(9), parse_gpus(gpus))
    apart = ("trainer.layout=split", "actor_rollout_ref.rollout.nnodes=1")
    with pytest.raises(ConfigError, match=r"of 2 nodes of 8 GPUs, 1 only sample .* 8 GPUs of a node are the reward"):
        located(config_of(8, *apart), parse_gpus("2x8x80"))

    def title_of(server: int, gpus: str) -> str:
        place = parse_gpus(gpus)
        return report(located(config_of(server), place), [], [], place).splitlines()[1]

    title = title_of(8, "10x80")
    assert title.startswith("rank 0 of 2; on 1 x 2 GPUs")
    assert "besides these, 8 of one node are the reward's server's" in title
    title = title_of(6, "2x8x80")
    assert title.startswith("rank 0 of 8; on 1 x 8 GPUs")
    assert title.endswith("6 of one node are the reward's server's, and no role uses that node; 2 GPUs are left unused")


def test_a_critic_on_gpus_of_its_own(tmp_path: Path) -> None:
    """Each role is sharded over its own GPUs, and takes nothing of the other's; engines are beside the actor alone."""
    config = run_config(own_critic(tmp_path), "tinywiki")
    found = dry_run(config, parse_gpus("8x80"))
    assert [(phase.phase, phase.device) for phase in found.phases] == [
        *((phase, "trains the actor") for phase in ("sample", "score", "update", "sync")),
        *((phase, "trains the critic") for phase in ("score", "update")),
    ]
    for phase in found.phases:
        of_critic = phase.device == "trains the critic"
        working = {part.split()[0].strip(":") for part in phase.parts if part != "CUDA graphs"}
        assert working == ({"critic", "processes"} if of_critic else {"actor", "engine", "processes"})
        awake = bool(phase.parts.get("engine"))
        assert phase.parts["processes"] == GIB * (1 if of_critic or awake else 2)
        assert ("CUDA graphs" in phase.parts) == (not of_critic and phase.phase is not Phase.SAMPLE)
    actor, critic = found.roles
    assert actor.idle.allocated == pytest.approx(16 * actor.num_params / 6, rel=0.03)  # and the anchor
    assert critic.idle.allocated == pytest.approx(12 * critic.num_params / 2, rel=0.03)
    assert actor.groups == Groups(6, 1, 6) and critic.groups == Groups(2, 1, 2)
    assert "6 engines of 1 take turns with the ranks; the last 2 of each node are the critic's alone" in found.report
    with pytest.raises(ConfigError, match="leave no GPU for the actor out of the 2"):
        dry_run(config, parse_gpus("2x80"))


def test_the_least_time_of_a_critic_beside_the_actor(tmp_path: Path) -> None:
    """In each phase the slower of the two, where in turns it is the sum."""

    def role(name: RoleName, score: float, update: float) -> Role:
        work = Work([Operation(989e12, torch.bfloat16, 0)])  # a second
        times = ((Phase.SCORE, score), (Phase.UPDATE, update))
        return Role(name, 1, Peak(0, 0), [Pass(p, "", Peak(0, 0), work, s, False) for p, s in times], Groups(1))

    h100 = next(gpu for gpu in GPUS if gpu.name == "H100")
    roles = [role("actor", 3, 5), role("critic", 4, 2)]
    own = run_config(own_critic(tmp_path), "tinywiki")
    turns = run_config([*own_critic(tmp_path), "critic.n_gpus_per_node=null"], "tinywiki")
    assert least_seconds_of_step(own, roles, h100) == pytest.approx(4 + 5)
    assert least_seconds_of_step(turns, roles, h100) == pytest.approx(7 + 7)


def test_the_three_settings_that_gain_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With made-up gains: of the anchor's offloading 10, of a smaller chunk none."""

    def actor(name: str, config: Config, kind: str, phases: list[Phase]) -> Role:
        policy, fsdp = config.actor_rollout_ref, config.actor_rollout_ref.actor.fsdp_config
        gain = 70 * fsdp.param_offload + 50 * fsdp.optimizer_offload + 10 * policy.ref.fsdp_config.param_offload
        peak = Peak(0, 1000 - gain - 30 * policy.model.enable_gradient_checkpointing)
        return Role("actor", GIB, Peak(0, 300), [Pass(Phase.UPDATE, "update", peak, Work(), 1.0, True)], Groups(1))

    monkeypatch.setattr("verl.planning.dry_run.run.run_role", actor)
    config, place = run_config(overrides_of(tmp_path, "trainer.device=auto"), "tinywiki"), parse_gpus("1xH100")
    config.actor_rollout_ref.rollout.dtype = "bfloat16"
    roles = [actor("actor", config, "cuda", [])]
    [worst] = [use for use in device_phases(config, roles, place) if use.phase is Phase.UPDATE]
    assert three_settings(config, roles, place, worst) == [
        (f"{ACTOR}.fsdp_config.param_offload=true", 70),
        (f"{ACTOR}.fsdp_config.optimizer_offload=true", 50),
        (CHECKPOINTING, 30),
    ]


def test_a_critic_of_its_own_on_cpu_by_hand(tmp_path: Path) -> None:
    """A worker of each role, beside an engine: each has half of the engine, and of the machine."""
    cpu = ("trainer.n_gpus_per_node=2", "critic.n_gpus_per_node=1", "trainer.device=cpu")
    config = run_config(own_critic(tmp_path, *cpu), "tinywiki")
    rollout = config.actor_rollout_ref.rollout
    rollout.num_engines, rollout.kv_cache_gib, rollout.dtype = 1, 0.5, "bfloat16"
    values = Pass(Phase.SCORE, "values", Peak(700, 0), Work(), 1.0, by_tokens=True)
    roles = [Role("actor", GIB // 4, Peak(300, 0), [], Groups(1)), Role("critic", 1, Peak(200, 0), [values], Groups(1))]
    *of_actor, score, update = device_phases(config, roles, Place(2, 8 * GIB))
    both = {"engines": 0.5 * GIB, "processes": GIB / 2 + 0.5 * 1.25 * GIB}
    assert [phase.parts for phase in of_actor] == [{"actor at rest": 300, "freed blocks": 0, **both}] * 3
    assert score.parts == {"critic: values": 700, "freed blocks": 0.4 * 500, **both}
    assert update.parts == {"critic at rest": 200, "freed blocks": 0, **both}


def test_workers_on_cpu_by_hand(tmp_path: Path) -> None:
    """Two workers of two roles, beside three engines: each has half of the engines, and of the machine."""
    config = run_config(overrides_of(tmp_path, CHECKPOINTING, "trainer.n_gpus_per_node=2"), "tinywiki")
    rollout = config.actor_rollout_ref.rollout
    rollout.num_engines, rollout.kv_cache_gib, rollout.dtype = 3, 0.5, "bfloat16"
    update = Pass(Phase.UPDATE, "update", Peak(1000, 0), Work(), 1.0, by_tokens=True)
    values = Pass(Phase.SCORE, "values", Peak(700, 0), Work(), 1.0, by_tokens=True)
    roles = [
        Role("actor", GIB // 4, Peak(300, 0), [update], Groups(1)),
        Role("critic", 1, Peak(200, 0), [values], Groups(1)),
    ]
    score, updated, sync = device_phases(config, roles, Place(2, 8 * GIB))
    both = {"engines": 1.5 * GIB, "processes": GIB + 1.5 * 1.25 * GIB}
    assert score.parts == {"actor at rest": 300, "critic: values": 700, "freed blocks": 0.4 * 500, **both}
    assert updated.parts == {
        "actor: update": 1000,
        "critic at rest": 200,
        "freed blocks": pytest.approx(1.1 * 700),
        **both,
    }
    assert sync.parts == {"actor at rest": 300, "critic at rest": 200, "freed blocks": 0, **both}


@pytest.mark.parametrize(("eager", "graphs"), [("null", {"CUDA graphs": GIB}), ("true", {})])
def test_an_engine_that_sleeps_by_hand(eager: str, graphs: dict[str, int], tmp_path: Path) -> None:
    """It keeps its process and its CUDA graphs, which are in its share while it samples."""
    rollout = "actor_rollout_ref.rollout"
    config = run_config(overrides_of(tmp_path, f"{rollout}.enforce_eager={eager}", "trainer.device=auto"), "tinywiki")
    config.actor_rollout_ref.rollout.dtype = "bfloat16"
    passes = [Pass(Phase.UPDATE, "update", Peak(0, 1000), Work(), 1.0, by_tokens=True)]
    role = Role("actor", GIB, Peak(0, 300), passes, Groups(1))
    sample, score, update, sync = device_phases(config, [role], place := parse_gpus("1xH100"))
    share = config.actor_rollout_ref.rollout.gpu_memory_utilization * place.memory
    assert sample.parts == {"actor at rest": 300, "engine": share, "processes": GIB}
    assert score.parts == {"actor at rest": 300, "engine": 0, "processes": 2 * GIB, **graphs}
    assert update.parts == {"actor: update": 1000, "engine": 0, "processes": 2 * GIB, **graphs}
    assert sync.parts == {"actor at rest": 300, "engine": 2 * GIB, "processes": GIB, **graphs}


def test_a_run_that_the_devices_do_not_divide(tmp_path: Path) -> None:
    ranks = "actor_rollout_ref.rollout.tensor_model_parallel_size=3"
    config = run_config(overrides_of(save_model(tmp_path, SMALL), ranks, "trainer.device=cpu"), "tinywiki")
    with pytest.raises(ConfigError, match="must divide the number of GPUs per node that sample"):
        dry_run(config, parse_gpus("8x80"))


def test_off_loaded_tensors_leave_the_device_that_only_seems_to_be_there(tmp_path: Path) -> None:
    model = save_model(tmp_path, SMALL)
    off = [f"{ACTOR}.fsdp_config.{part}_offload=true" for part in ("param", "optimizer")]
    off += ["actor_rollout_ref.ref.fsdp_config.param_offload=true"]
    stays, moves = (actor_of(overrides_of(model, *more), "cuda", Phase.UPDATE) for more in ([], off))
    assert stays.idle.allocated > 16 * stays.num_params  # weights, two moments and the anchor, float32
    assert moves.idle.allocated < 0.05 * stays.idle.allocated
    assert peaks([moves])["update"] == pytest.approx(peaks([stays])["update"], rel=0.01)


def test_moments_leave_no_holes_on_the_device(tmp_path: Path) -> None:
    """What a role keeps while engines sample is hardly more than its tensors, and the moments are AdamW's own."""
    sizes = TWO_LAYERS | {"vocab_size": 65536, "hidden_size": 256}
    actor = actor_of(overrides_of(save_model(tmp_path, sizes), "trainer.device=auto"), "cuda", Phase.UPDATE)
    assert actor.idle.allocated > 16 * actor.num_params
    assert actor.idle.held <= 1.05 * actor.idle.allocated + 2 * 20 * 2**20
    weights = [torch.nn.Parameter(torch.arange(4.0)) for _ in range(2)]
    lazy, ready = (build_adamw([weight], OptimConfig()) for weight in weights)
    make_moments(ready)
    for _ in range(2):
        for weight, optimizer in zip(weights, (lazy, ready), strict=True):
            weight.grad = torch.ones(4)
            optimizer.step()
    assert torch.equal(*weights)
    for key, value in lazy.state[weights[0]].items():
        other = ready.state[weights[1]][key]
        assert torch.equal(value, other) and value.dtype == other.dtype and value.device == other.device


def test_segments_by_hand() -> None:
    """A CUDA allocator: 512 bytes from a segment of 2 MiB, 3 MiB from one of 20 MiB, 30 MiB from its own."""
    mib, segments = 2**20, Segments()
    small, other = segments.take(100), segments.take(700)
    assert segments.held == 2 * mib
    medium = segments.take(3 * mib)
    assert segments.held == 22 * mib
    rest = segments.take(16 * mib)  # fits into what is left of the segment
    assert segments.held == 22 * mib
    segments.give(medium)
    large = segments.take(4 * mib)  # 3 MiB and 1 MiB are free, apart from each other
    assert segments.held == 42 * mib
    for block in (rest, large):
        segments.give(block)
    assert segments.held == 2 * mib
    whole = segments.take(20 * mib)  # the free neighbours are one block again
    assert segments.held == 22 * mib
    for block in (small, other, whole):
        segments.give(block)
    assert segments.held == 0
    segments.take(31 * mib)
    assert segments.held == 32 * mib


def test_a_roofline_by_hand() -> None:
    h100 = machine_of(next(gpu for gpu in GPUS if gpu.name == "H100"), PROMISED)
    work = Work([Operation(989e12, torch.bfloat16, 0), Operation(0.0, torch.bfloat16, 6_700_000_000_000)])
    one, node = Groups(1), Groups(8)
    assert h100.cost(work, one).seconds == pytest.approx(3.0)  # a second of arithmetic, and two of reading
    assert h100.cost(work, one, share=0.5).seconds == pytest.approx(1.5)
    work.sent["all-reduce"] = int(450e9 * 8 / 7)
    work.sent["all-gather"] = int(900e9 * 8 / 7)
    assert h100.cost(work, node).seconds == pytest.approx(4.0)  # twice round, and 2 seconds, beside the 3


def test_gradients_of_copies_are_summed_between_nodes() -> None:
    """Two nodes of 8: as one group all goes by the network cards; with a copy on each, what they sum does."""
    h100, num_bytes = machine_of(next(gpu for gpu in GPUS if gpu.name == "H100"), PROMISED), 10**12
    work = Work([], Counter({"all-gather": num_bytes, "all-reduce": num_bytes}))
    assert sum(h100.sending(work, Groups(16)).values()) == pytest.approx(3 * num_bytes * 15 / 16 / 50e9)
    on_a_node, between = num_bytes * 7 / 8 / 450e9, 2 * num_bytes / 2 / 50e9
    assert sum(h100.sending(work, Groups(8, replicas=2)).values()) == pytest.approx(on_a_node + between)
    config = run_config(["trainer.nnodes=2", "actor_rollout_ref.actor.fsdp_config.fsdp_size=8"])
    assert rank_groups(config, 8) == Groups(8, 2, per_node=8) and rank_groups(config, -1) == Groups(16, 1, per_node=8)


@pytest.mark.parametrize(
    ("text", "ranks", "names"),
    [("8x80", 8, ["A100", "H100"]), ("4096xH200", 4096, ["H200"]), ("4x8xA100", 32, ["A100"])],
)
def test_gpus_by_size_or_name(text: str, ranks: int, names: list[str]) -> None:
    place = parse_gpus(text)
    assert (place.num_devices, [gpu.name for gpu in place.gpus]) == (ranks, names)
    assert place.memory < int(GIB * 142)


@pytest.mark.parametrize(
    ("gpus", "nodes", "each"), [("8x80", 1, 8), ("4096x80", 512, 8), ("4x80", 1, 4), ("3x4x80", 3, 4), ("2x4x80", 2, 4)]
)
def test_nodes_of_gpus(gpus: str, nodes: int, each: int, tmp_path: Path) -> None:
    """Nodes stay as large as the settings say where that divides the GPUs; the settings themselves stay as they are."""
    config = run_config(overrides_of(tmp_path, "trainer.n_gpus_per_node=8"), "tinywiki")
    trainer = located(config, parse_gpus(gpus)).trainer
    assert (trainer.nnodes, trainer.n_gpus_per_node, trainer.device) == (nodes, each, "cuda")
    assert (config.trainer.nnodes, config.trainer.n_gpus_per_node, config.trainer.device) == (1, 8, "cpu")


def test_gpus_that_are_no_whole_nodes(tmp_path: Path) -> None:
    config = run_config(overrides_of(tmp_path, "trainer.n_gpus_per_node=8"), "tinywiki")
    with pytest.raises(ConfigError, match="12 GPUs do not fill whole nodes of 8: .* 3x4x80"):
        located(config, parse_gpus("12x80"))


@pytest.mark.parametrize("text", ["8", "8xH1", "0x80", "x80", "2x0x80", "2x2x2x80"])
def test_gpus_that_are_not_understood(text: str) -> None:
    with pytest.raises(ConfigError, match="8xH100"):
        parse_gpus(text)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = [*overrides_of(save_model(tmp_path, SMALL), *LARGE), f"{ACTOR}.ppo_max_token_len_per_gpu=8192"]
    assert main(["--config-name", "tinywiki", "--gpus", "8x80", *overrides]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in printed[4:8]] == ["sample", "score", "update", "sync"]
    assert printed[-1].startswith("ok ")


def test_the_command_advises_on_the_gpu_that_is_full(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The critic's micro-batches are far too large: settings of the actor gain nothing on its GPUs."""
    large = [*LARGE, f"{CRITIC}.ppo_max_token_len_per_gpu=163840", "data.max_prompt_length=8192"]
    large += [f"{ACTOR}.use_kl_loss=false", "actor_rollout_ref.rollout.enforce_eager=true"]
    assert main(["--config-name", "tinywiki", "--gpus", "8x2", *own_critic(tmp_path, *large)]) == 1
    verdict = capsys.readouterr().out.splitlines()[-1]
    assert verdict.startswith("FAIL") and "at the peak of the phase update; change " in verdict
    changes = re.findall(r"([\w.]+=\w+) \(-", verdict)
    assert f"{CRITIC}.ppo_max_token_len_per_gpu=81920" in changes
    assert all(change.startswith("critic.") for change in changes)


def test_ranks_that_share_a_row_have_half_of_it(tmp_path: Path) -> None:
    """A row beyond the budget goes alone: two ranks do half of its work each, with half of its activations."""
    model = save_model(tmp_path, SMALL)
    alone = ["trainer.n_gpus_per_node=2", f"{ACTOR}.use_dynamic_bsz=true", f"{ACTOR}.ppo_max_token_len_per_gpu=64"]
    shared = [*alone, f"{ACTOR}.ulysses_sequence_parallel_size=2"]
    lone, sharing = (actor_of(overrides_of(model, *more), "cpu", Phase.UPDATE) for more in (alone, shared))
    whole, half = (pass_of(role, "update") for role in (lone, sharing))
    assert half.work.flops == pytest.approx(whole.work.flops / 2, rel=0.02)
    assert half.peak.allocated < 0.8 * whole.peak.allocated
    assert half.times == 2 * whole.times  # two ranks with one row at a time, not with one each
    micro_batches, swaps = 2, 6  # before and behind attention: forward, backward, and the anchor's forward
    assert half.work.calls["all-to-all"] == micro_batches * swaps and not whole.work.calls["all-to-all"]
    assert sharing.groups.of("all-to-all") == (2, True)


def test_the_products_of_experts_by_hand(tmp_path: Path) -> None:
    """Each token has two of eight experts, whose three matrices of 128 x 64 are 2 FLOPs a number in the forward pass
    and 4 in the backward pass.
    """
    sizes = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "vocab_size": 512}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "intermediate_size": 64}
    flops = []
    for layers in (1, 2):
        config = Qwen3MoeConfig(**sizes, **experts, num_hidden_layers=layers)
        config.save_pretrained(tmp_path / f"model_{layers}")
        settings = [f"actor_rollout_ref.model.path={tmp_path}/model_{layers}", "trainer.device=auto"]
        settings += ["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n_agent=4", "data.train_batch_size=4"]
        settings += ["actor_rollout_ref.actor.ppo_mini_batch_size=16", "trainer.n_gpus_per_node=1"]
        settings += ["actor_rollout_ref.actor.use_dynamic_bsz=true"]
        settings += ["actor_rollout_ref.rollout.tensor_model_parallel_size=1"]
        [role] = run_roles(run_config(settings), "cuda")
        [update] = [one for one in role.passes if one.name == "update"]
        flops.append(update.work.flops)
        num_tokens = 16 * 1024 / update.times
    projections = 128 * 128 + 2 * 128 * 64 + 128 * 128
    attention = 7 * 128 * 1024  # two products forward, five backward, half of the square
    of_a_token = 6 * (projections + 2 * 3 * 128 * 64 + 128 * 8) + attention
    assert flops[1] - flops[0] == pytest.approx(num_tokens * of_a_token, rel=1e-6)


def test_a_product_by_onednn_counts_like_pytorchs_own() -> None:
    """[5, 7] by [7, 3]: 2 x 5 x 7 x 3 operations."""
    left, right = torch.randn(5, 7), torch.randn(3, 7)
    work, own = Work(), (left, right.T)
    onednn = (left, right, None, "none", [], "")
    for func, args in ((torch.ops.aten.mm.default, own), (torch.ops.mkldnn._linear_pointwise.default, onednn)):
        counted = work.count(func, args, {}, func(*args))
        assert counted is not None and counted.flops == 210
