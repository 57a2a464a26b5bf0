"""Relations between keys, checked in one place. Types and ranges are checked field by field in convert.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

from url_text import refused_address
from verl.algorithms.traits import ESTIMATOR_TRAITS, Read
from verl.config.rules.asynchronous import asynchronous_problems
from verl.config.rules.objective import ACTOR, OBJECTIVE_CHECKS, guard_problems
from verl.config.rules.placement import fewer_nodes_problems, placement_problems
from verl.config.rules.predicates import estimator_traits, trajectories_per_step
from verl.config.rules.rewards import reward_server_problems
from verl.config.rules.without_effect import inert_problems
from verl.config.sections.model import ModelConfig, OptimConfig
from verl.config.sections.rollout import ValKwargs
from verl.config.sections.schema import Config, SftTrainerConfig
from verl.config.sections.trainer import TrainerConfig
from verl.errors import ConfigError

ROLLOUT = "actor_rollout_ref.rollout"

LOOPBACK = ("127.0.0.1", "localhost", "::1")
READ_BY_SOME: dict[str, tuple[Read, object]] = {
    "norm_adv_by_batch_std": ("batch_std", False),
    "gamma": ("gamma", 1.0),
    "lam": ("lam", 1.0),
    "gae_over_environment_tokens": ("chain", False),
}
"""Settings of `algorithm`: what of an estimator they set, and the default that all other estimators need."""


def validate(config: Config) -> None:
    """Raise one ConfigError that lists every contradiction in `config`."""
    raise_problems([problem for check in CHECKS for problem in check(config)])


def raise_problems(problems: list[str]) -> None:
    """Raise a ConfigError with the problems, one a line, if there are any."""
    if problems:
        raise ConfigError("\n".join(problems))


def _lengths(config: Config) -> Iterator[str]:
    data = config.data
    for name in ("max_start_length", "max_response_length", "max_obs_length"):
        if getattr(data, name) > data.max_prompt_length:
            yield (
                f"data.{name} ({getattr(data, name)}) is larger than data.max_prompt_length "
                f"({data.max_prompt_length}), the whole context: raise max_prompt_length"
            )


def _compaction(config: Config) -> Iterator[str]:
    """A summary has to fit behind the longest turn before it, and what follows it has to leave room for a turn."""
    agent, data, rollout = config.agent, config.data, config.actor_rollout_ref.rollout
    if agent.compact_at is None:
        return
    # The longest context: a turn may begin just below `compact_at`, and the summary is written behind it.
    summary = agent.max_summary_length or data.max_response_length
    behind = agent.compact_at + data.max_response_length
    if behind >= data.max_prompt_length:
        yield (
            f"agent.compact_at ({agent.compact_at}) and the turn after it (data.max_response_length="
            f"{data.max_response_length}) leave no room for the request for a summary in data.max_prompt_length "
            f"({data.max_prompt_length}): lower compact_at, or raise max_prompt_length"
        )
    elif behind + summary >= (window := rollout.prompt_length + rollout.response_length):
        yield (
            f"agent.compact_at ({agent.compact_at}), the turn after it (data.max_response_length="
            f"{data.max_response_length}) and a summary of {summary} tokens do not fit in the window of {window} "
            "tokens: lower compact_at or agent.max_summary_length"
        )
    # With less room than this, the context would be summarised again right after its summary.
    after = data.max_start_length + summary + data.max_obs_length
    if after >= agent.compact_at:
        yield (
            f"agent.compact_at ({agent.compact_at}) is no larger than what may follow a summary: a prompt "
            f"(data.max_start_length={data.max_start_length}), the summary ({summary}) and an observation "
            f"(data.max_obs_length={data.max_obs_length}) have {after} tokens. Raise compact_at, or lower one of them"
        )


def _groups(config: Config) -> Iterator[str]:
    rollout = config.actor_rollout_ref.rollout
    if config.do_search and rollout.n != 1:
        yield f"{ROLLOUT}.n must be 1 with do_search=true: set {ROLLOUT}.n_agent={rollout.n} instead"
    if not config.do_search and rollout.n_agent != 1:
        yield f"{ROLLOUT}.n_agent has no effect with do_search=false: set {ROLLOUT}.n={rollout.n_agent} instead"
    if config.trainer.val_only:
        return
    # Where a prompt has several trajectories, there is something to compare.
    if trajectories_per_step(config) > config.data.train_batch_size:
        return
    name = "n_agent" if config.do_search else "n"
    wish = f"the trajectories of one prompt, and {ROLLOUT}.{name}=1 gives it one: set {ROLLOUT}.{name} to 2 or more"
    if estimator_traits(config).compares_group:
        yield f"algorithm.adv_estimator={config.algorithm.adv_estimator} compares {wish}"
    if config.algorithm.filter_groups.enable:
        yield f"algorithm.filter_groups compares {wish}"


def _curriculum(config: Config) -> Iterator[str]:
    curriculum, estimator = config.data.curriculum, config.algorithm.adv_estimator
    if curriculum.min_keep_probability > curriculum.keep_probability:
        yield (
            f"data.curriculum.min_keep_probability ({curriculum.min_keep_probability:g}) is larger than "
            f"data.curriculum.keep_probability ({curriculum.keep_probability:g}), which it limits: lower it"
        )
    if curriculum.enable and not estimator_traits(config).compares_group and not config.trainer.val_only:
        comparing = ", ".join(name for name, traits in ESTIMATOR_TRAITS.items() if traits.compares_group)
        yield (
            "data.curriculum leaves out prompts whose rewards are all equal, but algorithm.adv_estimator="
            f"{estimator} learns from them, too: set data.curriculum.enable=False, or an estimator that compares the "
            f"trajectories of a prompt ({comparing})"
        )


def _batches(config: Config) -> Iterator[str]:
    mini, total = config.actor_rollout_ref.actor.ppo_mini_batch_size, trajectories_per_step(config)
    if mini > total and not config.trainer.val_only:
        yield (
            f"{ACTOR}.ppo_mini_batch_size ({mini}) is larger than the {total} trajectories of a step "
            "(data.train_batch_size x n_agent): lower it or sample more"
        )


def _strategies(config: Config) -> Iterator[str]:
    strategies = {
        f"{ACTOR}.strategy": config.actor_rollout_ref.actor.strategy,
        "critic.strategy": config.critic.strategy,
        "reward_model.strategy": config.reward_model.strategy,
    }
    for key, strategy in strategies.items():
        if strategy != "fsdp":
            yield f"{key}={strategy} is not available: models are sharded by FSDP2; set {key}=fsdp"


def _advantages(config: Config) -> Iterator[str]:
    algorithm = config.algorithm
    estimator = algorithm.adv_estimator
    traits = estimator_traits(config)
    for name, (read, usual) in READ_BY_SOME.items():
        if read not in traits.reads and getattr(algorithm, name) != usual:
            yield f"algorithm.{name} has no effect with algorithm.adv_estimator={estimator}: leave it at {usual}"
    if "batch_std" in traits.reads and algorithm.norm_adv_by_batch_std and algorithm.norm_adv_by_std_in_grpo:
        yield (
            "algorithm.norm_adv_by_batch_std and algorithm.norm_adv_by_std_in_grpo exclude each other: set "
            "norm_adv_by_std_in_grpo=False to divide by the batch's standard deviation"
        )
    if config.trainer.critic_warmup and not traits.needs_critic:
        yield f"trainer.critic_warmup must be 0: there is no critic with algorithm.adv_estimator={estimator}"
    if algorithm.apply_kl_after_advantage and not algorithm.use_kl_in_reward:
        yield "algorithm.apply_kl_after_advantage needs algorithm.use_kl_in_reward=True"
    if algorithm.use_future_kl_as_reward and not algorithm.apply_kl_after_advantage:
        yield "algorithm.use_future_kl_as_reward needs algorithm.apply_kl_after_advantage=True"


def _schedules(config: Config) -> Iterator[str]:
    yield from schedule_problems(config.actor_rollout_ref.actor.optim, f"{ACTOR}.optim")
    yield from schedule_problems(config.critic.optim, "critic.optim")


def schedule_problems(optim: OptimConfig, path: str) -> Iterator[str]:
    """Settings of a learning rate's schedule that nothing reads, or that give none; those at `path` in the config."""
    if optim.min_lr_ratio is not None and optim.warmup_style != "cosine":
        yield (
            f"{path}.min_lr_ratio has no effect with warmup_style={optim.warmup_style}: set {path}.warmup_style=cosine"
        )
    if optim.total_training_steps == 0:
        yield f"{path}.total_training_steps must be a number of steps, or -1 for the run's own"


def resuming_problems(trainer: TrainerConfig | SftTrainerConfig) -> Iterator[str]:
    """Settings that contradict each other about an earlier run, of an RL run or a warm start."""
    if trainer.resume_mode == "resume_path" and not trainer.resume_from_path:
        yield "trainer.resume_mode=resume_path needs trainer.resume_from_path"
    if trainer.resume_mode == "auto" and trainer.overwrite == "archive":
        yield (
            "trainer.resume_mode=auto resumes the run in the folder, but trainer.overwrite=archive moves it "
            "away: choose one"
        )
    if trainer.resume_from_path and trainer.resume_mode != "resume_path":
        yield (
            f"trainer.resume_from_path has no effect with resume_mode={trainer.resume_mode}: set "
            "resume_mode=resume_path"
        )


def _determinism(config: Config) -> Iterator[str]:
    if config.trainer.deterministic and not config.actor_rollout_ref.rollout.seed_per_request:
        yield f"trainer.deterministic=True needs {ROLLOUT}.seed_per_request=True: set it, or leave deterministic out"


def _retriever(config: Config) -> Iterator[str]:
    if config.retriever.deadline_s < config.retriever.timeout_s:
        yield "retriever.deadline_s (all attempts) is shorter than retriever.timeout_s (one attempt)"
    if config.retriever.engine is None and config.retriever.engine_kwargs:
        yield (
            "retriever.engine_kwargs has no effect without retriever.engine: set the engine, or leave engine_kwargs out"
        )
    yield from _retriever_url(config)
    yield from _own_retrievers(config)


def _feedback(config: Config) -> Iterator[str]:
    for tag in ("<search>", "</search>", "<answer>", "</answer>", "<information>", "</information>"):
        if tag in config.agent.feedback:
            yield f"agent.feedback contains {tag}, which would be read as an action: describe the tag in words"


def _frequencies(config: Config) -> Iterator[str]:
    for key in ("save_freq", "test_freq", "eval_ref_policy_freq"):
        if getattr(config.trainer, key) == 0:
            yield f"trainer.{key} must be a number of steps, or -1 for never"


def _own_retrievers(config: Config) -> Iterator[str]:
    retriever = config.retriever
    if retriever.placement == "apart":
        if retriever.launch is not None:
            yield "retriever.launch has no effect with retriever.placement=apart: set it to per_node, or leave it out"
        return
    if retriever.launch is None:
        yield (
            'retriever.placement=per_node needs the command that starts a retriever: "retriever.launch='
            "'CORPUS_PATH=data/wiki-18.jsonl bash retrieval_launch.sh'\""
        )
    if retriever.engine is not None:
        yield (
            "retriever.placement=per_node starts a server at retriever.url, but retriever.engine is used instead "
            "of it: leave one of them out"
        )
    if not _is_http_address(retriever.url) or urlsplit(retriever.url).hostname not in LOOPBACK:
        yield (
            "retriever.placement=per_node: each node uses its own retriever, and "
            f"retriever.url={refused_address(retriever.url)} is not a loopback address: write http://127.0.0.1:8000/retrieve"
        )


def _retriever_url(config: Config) -> Iterator[str]:
    if config.retriever.engine is not None or not config.do_search:
        return
    for url in config.retriever.url.split(","):
        if not _is_http_address(url.strip()):
            yield f"retriever.url: {refused_address(url.strip())!r} is not an address: write http://host:port/retrieve"


def _is_http_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # unbalanced brackets, a port that is no number or too large
        return False


def _format_reward(config: Config) -> Iterator[str]:
    model = config.reward_model
    if model.structure_format_score + model.retrieval_score > 1:
        yield (
            f"reward_model.structure_format_score ({model.structure_format_score}) + reward_model.retrieval_score "
            f"({model.retrieval_score}) is above 1, the reward of a correct answer: lower one of them"
        )
    if model.structure_format_score + model.final_format_score > 1:
        yield (
            f"reward_model.structure_format_score ({model.structure_format_score}) + reward_model.final_format_score "
            f"({model.final_format_score}) is above 1: in a broken format a wrong answer would be worth more than a "
            "correct one; lower one of them"
        )


def _sampling(config: Config) -> Iterator[str]:
    rollout = config.actor_rollout_ref.rollout
    for key, top_k in ((f"{ROLLOUT}.top_k", rollout.top_k), (f"{ROLLOUT}.val_kwargs.top_k", rollout.val_kwargs.top_k)):
        if top_k == 0:
            yield f"{key} must be a number of tokens, or -1 for all"
    values, defaults = rollout.val_kwargs, ValKwargs()
    for name in ("temperature", "top_p", "top_k"):
        if not values.do_sample and getattr(values, name) != getattr(defaults, name):
            yield (
                f"{ROLLOUT}.val_kwargs.{name} has no effect with do_sample=False: "
                f"set {ROLLOUT}.val_kwargs.do_sample=True"
            )


def _adapters(config: Config) -> Iterator[str]:
    yield from adapter_problems(config.actor_rollout_ref.model, "actor_rollout_ref.model")
    yield from adapter_problems(config.critic.model, "critic.model")


def adapter_problems(model: ModelConfig, section: str) -> Iterator[str]:
    """Settings of adapters that contradict each other, of the model in that section."""
    usual = ModelConfig()
    if model.lora_rank:
        if not model.target_modules:
            yield f"{section}.target_modules is empty: name layers, or set {section}.target_modules=all-linear"
        return
    for name in ("lora_alpha", "target_modules"):
        if getattr(model, name) != getattr(usual, name):
            yield (
                f"{section}.{name} has no effect with lora_rank=0, because all weights are trained: set "
                f"{section}.lora_rank to 16, for example, or leave {name} out"
            )


CHECKS: tuple[Callable[[Config], Iterator[str] | list[str]], ...] = (
    inert_problems,
    _lengths,
    _groups,
    _compaction,
    _curriculum,
    _batches,
    placement_problems,
    fewer_nodes_problems,
    reward_server_problems,
    asynchronous_problems,
    _strategies,
    _advantages,
    *OBJECTIVE_CHECKS,
    _schedules,
    lambda config: resuming_problems(config.trainer),
    _determinism,
    _retriever,
    _feedback,
    _frequencies,
    guard_problems,
    _format_reward,
    _sampling,
    _adapters,
)
