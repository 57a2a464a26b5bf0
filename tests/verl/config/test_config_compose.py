"""Composing: overrides, recipe files, and errors that name the key, also for the keys of other projects."""

from __future__ import annotations

import os
import pickle
import re
import shutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
from omegaconf import DictConfig, ListConfig, OmegaConf
from run_config import run_config

from verl.algorithms.anchor import follow
from verl.config import CONFIG_DIR, Config, load, load_config, load_variants, to_yaml
from verl.config.loading.compose import normalise_overrides
from verl.config.loading.foreign import RENAMED, UNSUPPORTED
from verl.config.loading.run import load_sft_config
from verl.config.sections.fields import is_known, leaves, section, setting, value_at
from verl.errors import ConfigError


@cache
def published() -> DictConfig | ListConfig:
    """The tree as it stands in its file."""
    return OmegaConf.load(CONFIG_DIR / "ppo_trainer.yaml")


def test_defaults_of_the_tree_are_those_of_the_schema() -> None:
    config = load(Config, "ppo_trainer")
    expanded = {k: value_at(Config(), k) for k in leaves(Config)}
    expanded = {k: os.path.expanduser(v) if isinstance(v, str) else v for k, v in expanded.items()}
    assert {k: value_at(config, k) for k in leaves(Config)} == expanded


def test_the_tree_has_every_key_of_the_schema_and_no_other() -> None:
    tree = published()
    missing = [key for key in leaves(Config) if OmegaConf.is_missing(tree, key) or not _has(tree, key)]
    assert not missing
    load_config("ppo_trainer")  # an extra key would raise


@pytest.mark.parametrize(
    "more",
    [
        (),
        ("data.max_prompt_length=2048", "trainer.nnodes=3"),  # other keys follow the first; the second is set already
        ("reward.kwargs.lowest=0.1", "reward.kwargs={highest: 1}", "data.train_files=[a.parquet,b.parquet]"),
        ("~trainer.nnodes", "+trainer.val_before_train=false", "data.val_files='c=d'"),
    ],
)
def test_a_variant_is_what_load_config_gives(more: tuple[str, ...]) -> None:
    """Also after other variants of the same files."""
    overrides = ("trainer.nnodes=2", "reward.kwargs.weight=2", "data.max_response_length=300")
    variant = load_variants("ppo_trainer", overrides)
    variant(["trainer.nnodes=4", "reward.kwargs.other=1"])
    assert variant(more) == load_config("ppo_trainer", [*overrides, *more])
    with pytest.raises(ConfigError, match=r"trainer\.nodes"):
        variant(["trainer.nodes=1"])


def _has(tree: object, key: str) -> bool:
    for name in key.split("."):
        if name not in tree:  # type: ignore[operator]
            return False
        tree = tree._get_node(name)  # type: ignore[attr-defined]
    return True


def test_every_interpolated_default_is_documented_as_the_tree_has_it() -> None:
    tree = published()
    raw = OmegaConf.to_container(tree, resolve=False)
    interpolated = {k: value_at(raw, k) for k in leaves(Config)}
    interpolated = {k: v for k, v in interpolated.items() if isinstance(v, str) and "${" in v}
    assert interpolated == {k: key.shown for k, key in leaves(Config).items() if key.shown}


@pytest.mark.parametrize("prefix", ["", "+", "++"])
def test_a_plus_before_an_existing_key_changes_nothing(prefix: str) -> None:
    config = load_config("ppo_trainer", [f"{prefix}trainer.val_only=true", f"{prefix}max_turns=4"])
    assert (config.trainer.val_only, config.max_turns) == (True, 4)


def test_the_last_of_several_overrides_wins() -> None:
    config = load_config("ppo_trainer", ["max_turns=4", "+max_turns=5", "data.max_obs_length=7", "max_turns=6"])
    assert (config.max_turns, config.data.max_obs_length) == (6, 7)


def test_interpolated_keys_follow_and_can_be_set() -> None:
    config = load_config("ppo_trainer", ["data.max_prompt_length=900", "critic.ppo_micro_batch_size=8"])
    assert config.actor_rollout_ref.rollout.prompt_length == 900
    assert config.critic.forward_micro_batch_size == 8
    config = load_config("ppo_trainer", ["critic.forward_micro_batch_size=3"])
    assert (config.critic.forward_micro_batch_size, config.critic.ppo_micro_batch_size) == (3, 64)


def test_values_take_the_type_of_their_key() -> None:
    config = load_config(
        "ppo_trainer",
        [
            "actor_rollout_ref.actor.optim.betas=[0.9,0.95]",
            "actor_rollout_ref.rollout.temperature=1",
            "trainer.experiment_name=2024",
            "data.train_files=[a.parquet,'~/b.parquet']",
            "actor_rollout_ref.model.override_config.num_hidden_layers=2",
            "reward.kwargs={threshold: 0.5}",
        ],
    )
    assert config.actor_rollout_ref.actor.optim.betas == (0.9, 0.95)
    assert isinstance(config.actor_rollout_ref.rollout.temperature, float)
    assert config.trainer.experiment_name == "2024"
    assert config.data.train_files == ["a.parquet", os.path.expanduser("~/b.parquet")]
    assert config.actor_rollout_ref.model.override_config == {"num_hidden_layers": 2}
    assert config.reward.kwargs == {"threshold": 0.5}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("actor_rollout_ref.actor.optim.lrr=1", "did you mean 'actor_rollout_ref.actor.optim.lr'"),
        ("+actor_rollout_ref.actor.optim.lrr=1", "did you mean 'actor_rollout_ref.actor.optim.lr'"),
        ("++trainer.val_befor_train=true", "did you mean 'trainer.val_before_train'"),
        ("trainer.total_steps=5", "did you mean 'trainer.total_training_steps'"),
        ("actor.optim.lr=1", "did you mean 'actor_rollout_ref.actor.optim.lr'"),
        ("actor_rollout_ref.n_agent=5", "did you mean 'actor_rollout_ref.rollout.n_agent'"),
        ("actor_rollout_ref.actor.optim={lrr: 1}", "did you mean 'actor_rollout_ref.actor.optim.lr'"),
        ("qqqqqq=1", "unknown key 'qqqqqq': --help lists all keys"),
        ("max_turns=abc", "max_turns: expected int, got 'abc'"),
        ("max_turns=2.5", "max_turns: expected int, got 2.5"),
        ("max_turns=true", "max_turns: expected int, got True"),
        ("max_turns=null", "max_turns: expected int, got None"),
        ("max_turns=-1", "max_turns: must be at least 0, got -1"),
        ("do_search=1", "do_search: expected bool, got 1"),
        ("actor_rollout_ref.actor.optim.lr=nan", "actor_rollout_ref.actor.optim.lr: expected float, got nan"),
        ("actor_rollout_ref.actor.optim.betas=[0.9]", "expected list of 2 float"),
        ("actor_rollout_ref.actor.optim.betas=[0.9,1.0]", "betas: must be less than 1"),
        ("actor_rollout_ref.actor.kl_loss_type=k6", "expected one of kl, k1, abs"),
        ("actor_rollout_ref.actor.kl_loss_type=full_reverse+", "expected one of kl, k1, abs"),
        ("actor_rollout_ref.actor.clip_ratio_c=1", "actor.clip_ratio_c: must be greater than 1, got 1"),
        ("algorithm.adv_estimator=ppo", "algorithm.adv_estimator: expected one of gae, grpo, grpo_turns"),
        ("algorithm.ref_policy_ema_tau=1.5", "algorithm.ref_policy_ema_tau: must be at most 1, got 1.5"),
        ("algorithm.gamma=1.5", "algorithm.gamma: must be at most 1, got 1.5"),
        ("algorithm.lam=nan", "algorithm.lam: expected float, got nan"),
        ("algorithm.kl_ctrl.kl_coef=-1", "algorithm.kl_ctrl.kl_coef: must be at least 0, got -1"),
        ("algorithm.kl_ctrl.target_kl=0", "algorithm.kl_ctrl.target_kl: must be greater than 0, got 0"),
        ("algorithm.kl_ctrl.horizon=0", "algorithm.kl_ctrl.horizon: must be at least 1, got 0"),
        ("critic.cliprange_value=0", "critic.cliprange_value: must be greater than 0, got 0"),
        ("critic.cliprange_value=nan", "critic.cliprange_value: expected float, got nan"),
        ("actor_rollout_ref.actor.kl_topk_gradient=exact", "kl_topk_gradient: expected one of corrected, published"),
        ("actor_rollout_ref.actor.rollout_correction.importance=row", "importance: expected one of none, token, seq"),
        ("actor_rollout_ref.actor.rollout_correction.reject=row", "reject: expected one of none, token, sequence, geo"),
        ("actor_rollout_ref.actor.rollout_correction.reject_low=-0.1", "reject_low: must be at least 0, got -0.1"),
        ("algorithm.ref_policy_ema_tau=-0.1", "algorithm.ref_policy_ema_tau: must be at least 0, got -0.1"),
        ("reward_model.structure_format_score=1.1", "reward_model.structure_format_score: must be at most 1"),
        ("reward_model.final_format_score=-0.1", "reward_model.final_format_score: must be at least 0"),
        ("reward_model.retrieval_score=1.1", "reward_model.retrieval_score: must be at most 1"),
        ("actor_rollout_ref.rollout.temperature=0.005", "rollout.temperature: must be at least 0.01, got 0.005"),
        ("actor_rollout_ref.rollout.val_kwargs.temperature=0", "val_kwargs.temperature: must be at least 0.01, got 0"),
        ("trainer.logger=[nothing]", "trainer.logger: expected list of one of console, wandb"),
        ("trainer.device=tpu", "trainer.device: expected one of auto, cpu, cuda, got 'tpu'"),
        ("actor_rollout_ref.actor=5", "'actor_rollout_ref.actor' is a section"),
        ("reward.kwargs=5", "reward.kwargs: expected mapping"),
        ("data.tokenizer=${nowhere}", "nowhere"),
        ("max_turns", "override 'max_turns' cannot be read (missing EQUAL"),
        ("max_turns=a<b", "quote a value with special characters"),
        ("trainer.experiment_name=null", "trainer.experiment_name: expected str, got None"),
        ("max_turns=1,2", "has several values"),
        ("data/max_turns=1", "unknown key 'data/max_turns'"),
    ],
)
def test_a_bad_override_is_an_error_that_names_the_key(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        run_config([override])


def test_a_recipe_anywhere_starts_from_the_tree(tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text("defaults: [ppo_trainer, _self_]\nmax_turns: 3\ndata: {max_obs_length: 9}\n")
    config = load_config("small", ["data.max_start_length=8"], str(tmp_path))
    assert (config.max_turns, config.data.max_obs_length, config.data.max_start_length) == (3, 9, 8)
    assert config.data.train_batch_size == 1024


def test_folders_have_names_in_any_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the clone, of a recipe, and in overrides: Hydra's grammar knows letters without accents only."""
    clone, recipes = (Path(shutil.copytree(CONFIG_DIR, tmp_path / name)) for name in ("d'\u00e9 \u6cb3", "m\u00eames"))
    (recipes / "ppo_trainer.yaml").unlink()
    monkeypatch.setattr("verl.config.loading.compose.CONFIG_DIR", clone)
    (recipes / "small.yaml").write_text("defaults: [ppo_trainer, _self_]\nmax_turns: 3\n")
    paths = (f"actor_rollout_ref.model.path={clone}", f"+trainer.default_local_dir='{recipes}/${{max_turns}}'")
    config = load_config("small", paths, str(recipes))
    assert config.max_turns == 3 and config.actor_rollout_ref.model.path == str(clone)
    assert config.trainer.default_local_dir == f"{recipes}/3"


@pytest.mark.parametrize(
    "text",
    [
        *("2024_01_01", "1e-6", "0x10", "true", "007", "+5", "inf", "a,b", "x=y", "a(b)", "a<b>", "#1 & co; {x}"),
        *("d'\u00e9 \u6cb3", 'say "yes"', "it's", "ends in \\", "a\\'b", "~nobody/x", "a b ", "*", "$HOME", "50%", ":"),
    ],
)
def test_text_is_taken_as_it_is_written(text: str) -> None:
    overrides = [f"trainer.experiment_name={text}", f"actor_rollout_ref.model.path=/m/{text}"]
    if "," not in text:  # several files need the brackets of a list, which may have been forgotten
        overrides.append(f"data.test_files=/d/{text}/x.parquet")
    config = load_config(overrides=overrides)
    assert config.trainer.experiment_name == text
    assert config.actor_rollout_ref.model.path == f"/m/{text}"
    assert config.data.test_files in (f"/d/{text}/x.parquet", load_config().data.test_files)


def test_quotation_marks_null_and_lists_keep_their_meaning() -> None:
    names = ["trainer.experiment_name='a b'", "trainer.project_name=${trainer.experiment_name}!", "data.tokenizer=null"]
    config = load_config(overrides=[*names, "data.train_files=['a,b',c]", 'data.test_files="x"'])
    assert (config.trainer.experiment_name, config.trainer.project_name, config.data.tokenizer) == ("a b", "a b!", None)
    assert (config.data.train_files, config.data.test_files) == (["a,b", "c"], "x")
    assert load_config(overrides=["data.test_files=Null"]).data.test_files is None, "as Hydra reads it"
    with pytest.raises(ConfigError, match="several values"):
        load_config(overrides=["data.train_files=a,b"])


@pytest.mark.parametrize(
    ("overrides", "kwargs", "val_kwargs"),
    [
        (["reward.kwargs={c: 3}"], {"a": 1, "b": 2, "c": 3}, {"d": 4}),
        (["~reward.kwargs", "~reward.val_kwargs"], {}, None),
        (["~reward.kwargs", "reward.kwargs={c: 3}"], {"c": 3}, {"d": 4}),
        (["~reward.kwargs", "reward.kwargs.c=3"], {"c": 3}, {"d": 4}),
        (["reward.kwargs.c=3", "~reward.kwargs"], {}, {"d": 4}),
        (["~reward.val_kwargs", "reward.val_kwargs={c: 3}"], {"a": 1, "b": 2}, {"c": 3}),
        (["reward.val_kwargs.c=3", "~reward.val_kwargs.d"], {"a": 1, "b": 2}, {"c": 3}),
    ],
)
def test_a_mapping_of_a_recipe_is_merged_or_replaced(
    overrides: list[str], kwargs: dict[str, int], val_kwargs: dict[str, int] | None, tmp_path: Path
) -> None:
    text = "defaults: [ppo_trainer, _self_]\nreward: {kwargs: {a: 1, b: 2}, val_kwargs: {d: 4}}\n"
    (tmp_path / "mine.yaml").write_text(text)
    for config in (load_config("mine", overrides, str(tmp_path)), load_variants("mine", [], str(tmp_path))(overrides)):
        assert (config.reward.kwargs, config.reward.val_kwargs) == (kwargs, val_kwargs)


def test_an_entry_of_a_mapping_that_is_null_can_be_set() -> None:
    config = load_config(overrides=["reward.val_kwargs.c=3"])
    assert config.reward.val_kwargs == run_config(["reward.val_kwargs.c=3"]).reward.val_kwargs == {"c": 3}
    for load_it in (run_config, lambda overrides: load_config(overrides=overrides)):
        with pytest.raises(ConfigError, match=r"reward\.val_kwargs\.c"):
            load_it(["~reward.val_kwargs.c"])


def test_numbers_and_truth_values_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables are texts; a text that is none of these says what is expected."""
    for name, value in {"NODES": "2", "RATE": "1e-5", "SEARCH": "false", "NAME": "007", "BAD": "two"}.items():
        monkeypatch.setenv(name, value)
    given = {
        "trainer.nnodes": "NODES",
        "actor_rollout_ref.actor.optim.lr": "RATE",
        "do_search": "SEARCH",
        "trainer.experiment_name": "NAME",
    }
    config = load_config(overrides=[f"{key}=${{oc.env:{name}}}" for key, name in given.items()])
    assert (config.trainer.nnodes, config.actor_rollout_ref.actor.optim.lr) == (2, 1e-5)
    assert (config.do_search, config.trainer.experiment_name) == (False, "007")
    with pytest.raises(ConfigError, match="trainer.nnodes: expected int, got 'two'"):
        load_config(overrides=["trainer.nnodes=${oc.env:BAD}"])
    with pytest.raises(ConfigError, match="trainer.nnodes: expected int, got '1e-5'"):
        load_config(overrides=["trainer.nnodes=${oc.env:RATE}"])


def test_an_unknown_key_in_a_recipe_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "wrong.yaml").write_text("defaults: [ppo_trainer, _self_]\ntrainer: {seeed: 3}\n")
    with pytest.raises(ConfigError, match=r"unknown key 'trainer.seeed': did you mean 'trainer.seed'"):
        load_config("wrong", [], str(tmp_path))


def test_a_missing_config_names_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"no config 'ppo_trainr.yaml' in .*ppo_trainer"):
        load_config("ppo_trainr")


@pytest.mark.parametrize("name", sorted(p.stem for p in CONFIG_DIR.glob("*.yaml") if "ppo_trainer" in p.read_text()))
def test_every_recipe_loads(name: str) -> None:
    assert load_config(name).trainer.experiment_name


def test_a_config_survives_pickle_and_yaml(tmp_path: Path) -> None:
    config = load_config("ppo_trainer", ["actor_rollout_ref.actor.optim.betas=[0.9,0.95]", "trainer.logger=[]"])
    assert pickle.loads(pickle.dumps(config)) == config
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert load_config("config", [], str(tmp_path)) == config


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["+data.max_prompt_length=900", "reward.kwargs={threshold: 0.5}", "trainer.logger=[]", "data.tokenizer='a<b'"],
        ["algorithm.adv_estimator=grpo"],
        ["data.max_start_length=600", "trainer.test_freq=0"],
        ["trainer.val_befor_train=true"],
        ["algorithm.gamma=1.5"],
        ["data.tokenizer=${nowhere}"],
    ],
)
def test_the_configs_of_other_tests_are_those_that_are_loaded(overrides: list[str]) -> None:
    """They compose the tree once: the same values, or the same errors, those of contradictions included."""
    found: list[Config | str] = []
    for make in (run_config, lambda given: load_config("ppo_trainer", given)):
        try:
            found.append(make(overrides))
        except ConfigError as error:
            found.append(str(error))
    assert found[0] == found[1]


@dataclass
class Inner:
    width: int = setting(3, "Width in tokens.", gt=0)


@dataclass
class Small:
    inner: Inner = section(Inner)
    name: str | None = setting(None, "A name.")


def test_any_schema_can_be_loaded(tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text("inner: {width: 4}\nname: null\n")
    assert load(Small, "small", ["name=x"], str(tmp_path)) == Small(Inner(4), "x")
    with pytest.raises(ConfigError, match=r"did you mean 'inner.width'"):
        load(Small, "small", ["inner.widht=2"], str(tmp_path))
    with pytest.raises(ConfigError, match=r"inner.width: must be greater than 0"):
        load(Small, "small", ["inner.width=0"], str(tmp_path))


@pytest.mark.parametrize(
    ("override", "answer"),
    [
        (
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
            "it is 'actor_rollout_ref.actor.ppo_micro_batch_size'",
        ),
        ("custom_reward_function.path=mine.py", "here it is 'reward.function', the dotted name of a function or class"),
        ("actor_rollout_ref.rollout.multi_turn.max_assistant_turns=3", "here it is 'max_turns', one less:"),
        ("actor_rollout_ref.rollout.multi_turn.max_user_turns=3", "here it is 'max_turns', the number of turns that"),
        ("actor_rollout_ref.rollout.val_kwargs.n=4", "not supported, because each validation prompt is answered once"),
        ("ray_init.num_cpus=8", "not supported, because Ray is started on this machine, or RAY_ADDRESS names"),
        ("num_generations=8", "here it is 'actor_rollout_ref.rollout.n_agent'"),
        ("beta=0.04", "here it is 'actor_rollout_ref.actor.kl_loss_coef', with"),
        ("ref_model_mixup_alpha=0.1", "here it is 'algorithm.ref_policy_ema_tau', 1 - alpha:"),
        ("+actor_rollout_ref.actor.fsdp_config.model_dtype=bf16", "not supported, because weights are always kept in"),
        ("critic.megatron.sequence_parallel=true", "not supported, because models are sharded with FSDP2 only"),
        # Only what is spelt alike: these share their section with a key, or a common last name, and nothing else.
        ("actor_rollout_ref.rollout.skip_dump=1", "--help lists all keys"),
        ("somebody.else.path=x", "--help lists all keys"),
        ("trainer.worker_nsight=1", "--help lists all keys"),
        ("actor_rollout_ref.rollout.temprature=1", "did you mean 'actor_rollout_ref.rollout.temperature'?"),
    ],
)
def test_the_answer_to_a_key_that_is_not_ours(override: str, answer: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(answer)):
        normalise_overrides(Config, [override])


ENTRIES = {key: ours for key, (ours, _) in RENAMED.items()}
TOLD = {key: how for key, (_, how) in RENAMED.items()} | UNSUPPORTED


@pytest.mark.parametrize("foreign", ENTRIES)
def test_our_name_can_be_set_in_place_of_the_foreign_one(foreign: str) -> None:
    tree = published()
    assert OmegaConf.select(tree, ENTRIES[foreign], default=tree) is not tree
    with pytest.raises(ConfigError, match=f"unknown key '{re.escape(foreign)}': here it is '{ENTRIES[foreign]}'"):
        normalise_overrides(Config, [f"{foreign}=1"])


@pytest.mark.parametrize("foreign", TOLD)
def test_keys_in_explanations_are_ours_and_the_explained_one_is_not(foreign: str) -> None:
    named = re.findall(r"\b(?:data|actor_rollout_ref|critic|reward|agent|algorithm|trainer)(?:\.\w+)+", TOLD[foreign])
    assert [key for key in named if not is_known(Config, key)] == []
    assert not is_known(Config, foreign)


@pytest.mark.parametrize("tau", [0.0, 0.9])
def test_the_anchor_keeps_one_minus_the_mixup_alpha_of_trl(tau: float) -> None:
    anchor, policy, alpha = torch.tensor([1.0]), torch.tensor([3.0]), 1 - tau
    follow([anchor], [policy], tau)
    assert anchor.item() == pytest.approx(alpha * 3.0 + (1 - alpha) * 1.0)


def test_a_warm_start_is_not_told_the_reasons_of_an_rl_run() -> None:
    with pytest.raises(ConfigError) as caught:
        load_sft_config(overrides=["data.truncation=left"])
    assert "filter_overlong_prompts" not in str(caught.value)
