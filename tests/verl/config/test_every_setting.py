"""Every setting is read by something the run does, or a change of it is refused, or warned of."""

from __future__ import annotations

import copy
import types
from typing import Any, Literal, Union, get_args, get_origin

import pytest
from run_config import run_config
from settings_read import settings_read

from verl.config import Config, check_supported
from verl.config.rules.config_warnings import config_warnings
from verl.config.rules.validate import validate
from verl.config.rules.without_effect import RULES, Rule, covered, without_effect
from verl.config.sections.fields import Key, leaves, value_at
from verl.errors import ConfigError
from verl.trainer.collapse_guard import LIMITS

ACTOR, REF, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.ref", "actor_rollout_ref.rollout"
GUARD, LORA = "trainer.collapse_guard", "actor_rollout_ref.model.lora_rank=8"
GRPO = ("algorithm.adv_estimator=grpo", f"{ROLLOUT}.n_agent=4")
KL_LOSS, ONE_STEP = f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.ppo_mini_batch_size=4096"
DYNAMIC = f"{ACTOR}.use_dynamic_bsz=true"
ENGINE = "retriever.engine=mine.Engine"
# Read from the config as a mapping, or by a name that a table holds.
READ_BY_NAME = {"trainer.metrics_port", "trainer.metrics_host", *(f"{GUARD}.{limit.setting}" for limit in LIMITS)}

# For each rule of the table: overrides with which its settings have no effect, and with which they have one.
PROGRAM = "agent.program='python agent.py'"
CASES: list[tuple[tuple[str, ...], tuple[str, ...]]] = [
    ((f"{ACTOR}.clip_ratio_low=0.2", f"{ACTOR}.clip_ratio_high=0.28"), (f"{ACTOR}.clip_ratio_high=0.28",)),
    ((*GRPO, ONE_STEP, f"{ACTOR}.policy_loss=reinforce"), GRPO),
    (GRPO, (*GRPO, KL_LOSS)),
    (
        (*GRPO, KL_LOSS, f"{ACTOR}.kl_loss_type=full_reverse", f"{ACTOR}.kl_topk_tokens=8",
         f"{ACTOR}.kl_use_tail_sampling=false", f"{ACTOR}.use_kl_iw=true"),
        (*GRPO, KL_LOSS, f"{ACTOR}.kl_loss_type=full_reverse", f"{ACTOR}.kl_topk_tokens=8", f"{ACTOR}.use_kl_iw=true"),
    ),
    ((), (f"{ACTOR}.rollout_correction.importance=token",)),
    ((), (f"{ACTOR}.rollout_correction.reject=token",)),
    ((), (f"{ACTOR}.llds_coef=0.1",)),
    ((*GRPO, ONE_STEP), GRPO),
    ((DYNAMIC,), ()),
    ((), (DYNAMIC,)),
    (GRPO, (*GRPO, KL_LOSS)),
    ((*GRPO, KL_LOSS, LORA), (*GRPO, KL_LOSS)),
    ((*GRPO, KL_LOSS), ()),
    ((*GRPO, ONE_STEP), GRPO),
    (GRPO, ()),
    ((DYNAMIC,), ()),
    ((), (DYNAMIC,)),
    ((), ()),
    ((), ("agent.format=chat",)),
    ((PROGRAM,), ()),
    ((), (PROGRAM,)),
    (("agent.format=chat", "do_search=false"), ("agent.format=chat",)),
    (("agent.format=chat",), ()),
    ((), ("agent.compact_at=3000", "data.max_prompt_length=4096")),
    (("do_search=false",), ()),
    ((), ("reward.launch='serve --port $PORT'", "+reward.kwargs.url='http://{server}/v1'")),
    ((ENGINE,), ()),
    ((), (ENGINE,)),
    (("do_search=false",), ()),
    (("algorithm.adv_estimator=rloo", f"{ROLLOUT}.n_agent=4"), GRPO),
    (GRPO, ()),
    ((), ("algorithm.ref_policy_ema_tau=0.9",)),
    ((*GRPO,), (*GRPO, "algorithm.filter_groups.enable=true")),
    (GRPO, (*GRPO, "data.curriculum.enable=true")),
    (("trainer.logger=[console]",), ()),
    ((), ("trainer.metrics_port=9100",)),
    ((), ("trainer.save_freq=10",)),
    ((), (f"{GUARD}.action=rollback", "trainer.save_freq=10")),
    ((f"{GUARD}.action='off'",), (*GRPO, KL_LOSS)),
]  # fmt: skip


def another_value(key: Key) -> Any:
    """One of the key's type that is not its default."""
    kinds = get_args(key.type) if get_origin(key.type) in (Union, types.UnionType) else (key.type,)
    kind = next(kind for kind in kinds if kind is not type(None))
    if get_origin(kind) is Literal:
        return next(choice for choice in get_args(kind) if choice != key.default)
    if kind is bool:
        return not key.default
    if kind in (int, float):
        return kind(0.25 + (key.default or 0) / 4) if kind is float else (key.default or 1) + 1
    if kind is str:
        return f"{key.default or ''}another"
    return {"a": 1} if get_origin(kind) is dict else (0.5, 0.6) if get_origin(kind) is tuple else ["another"]


def changed(config: Config, key: Key) -> Config:
    config = copy.deepcopy(config)
    section, _, name = key.path.rpartition(".")
    setattr(value_at(config, section) if section else config, name, another_value(key))
    return config


def what_is_said(config: Config) -> str:
    """Why it is refused, or else the warnings."""
    try:
        validate(config)
        check_supported(config)
    except ConfigError as error:
        return str(error)
    return "\n".join(config_warnings(config))


def test_every_setting_is_read_or_a_change_of_it_is_told() -> None:
    read, config, silent = settings_read(), run_config(GRPO), []
    for path, key in leaves(Config).items():
        section, _, name = path.rpartition(".")
        owner = type(value_at(config, section) if section else config)
        if path in READ_BY_NAME or any(
            name == one and (issubclass(owner, cls) or issubclass(cls, owner)) for cls, one in read
        ):
            continue
        says_so = key.meaning.startswith("Has no effect; accepted because Search-R1's scripts set it")
        if not says_so and name not in what_is_said(changed(config, key)):
            silent.append(path)
    assert silent == [], "nothing reads these, and nobody is told"


@pytest.mark.parametrize(
    ("rule", "cases"),
    [pytest.param(rule, cases, id=rule.keys[0]) for rule, cases in zip(RULES, CASES, strict=True)],
)
def test_a_setting_that_the_others_leave_without_effect_is_told(
    rule: Rule, cases: tuple[tuple[str, ...], tuple[str, ...]]
) -> None:
    unread, read = (run_config(overrides) for overrides in cases)
    assert rule.unread(unread)
    assert list(covered(rule))
    for key in covered(rule):
        assert key.path.rpartition(".")[2] in what_is_said(changed(unread, key)), key.path
        if not rule.unread(read):
            assert not [line for line in without_effect(changed(read, key)) if rule.why in line], key.path
    assert cases[0] == cases[1] or not rule.unread(read)


def test_what_follows_another_setting_is_not_told() -> None:
    """The critic's mini-batch is the actor's, and its model the policy's, unless they are given."""
    overrides = (f"{ACTOR}.ppo_mini_batch_size=512", f"{ACTOR}.ppo_epochs=2", f"{ACTOR}.shuffle=true", DYNAMIC)
    assert list(without_effect(run_config([*GRPO, *overrides]))) == []
    [line] = without_effect(run_config([*GRPO, *overrides, "critic.ppo_mini_batch_size=64"]))
    assert line.startswith("without effect: critic.ppo_mini_batch_size=64, since the advantage estimator has no critic")


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        ((f"{ACTOR}.rollout_correction.importance_cap=3",), "importance_cap=3.0"),
        ((f"{ACTOR}.rollout_correction.reject_low=0.1",), "reject_low=0.1"),
        ((ONE_STEP, f"{ACTOR}.clip_ratio_high=0.28", f"{ACTOR}.policy_loss=reinforce"), "clip_ratio_high=0.28"),
        ((f"{REF}.path=models/anchor",), f"{REF}.path=models/anchor"),
        (("algorithm.filter_groups.max_num_gen_batches=3",), "max_num_gen_batches=3"),
        (("algorithm.adv_estimator=rloo", "algorithm.norm_adv_by_std_in_grpo=false"), "norm_adv_by_std_in_grpo=False"),
    ],
)
def test_what_was_accepted_in_silence_is_warned_of_in_one_line(overrides: tuple[str, ...], key: str) -> None:
    [line] = config_warnings(run_config([*GRPO, *overrides]))
    assert key in line and "without effect" in line
