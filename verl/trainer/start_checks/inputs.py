"""What is checked before any model is loaded: run folder, prompt files, reward, and that the environment answers."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from verl.agent.environment import Environment, make_environment
from verl.config import Config
from verl.config.rules.predicates import has_critic, window_of
from verl.data.files import check_files
from verl.errors import ConfigError
from verl.pretrained import load_critic_tokenizer, load_model_config, load_policy_tokenizer
from verl.process.event_loop import run_to_end
from verl.process.startup import phase
from verl.process.storage import free_bytes
from verl.trainer.sampling.scoring import Scorer
from verl.trainer.start_checks.finding import require
from verl.trainer.start_checks.models import Models, models_of, require_embeddings, require_savable, require_weights
from verl.trainer.start_checks.prompts import PromptSets, check_templates, load_prompts, require_prompts
from verl.trainer.start_checks.resources import check_folder, check_one_checkpoint
from verl.trainer.start_checks.retrieval import REWARD_TODO, try_reward, try_steps

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


log = logging.getLogger(__name__)

VALIDATION_PROMPTS = "the validation prompts"


class Parts(NamedTuple):
    """The parts of a run that were created for the checks."""

    tokenizer: PreTrainedTokenizerBase
    environment: Environment
    scorer: Scorer


class Inputs(NamedTuple):
    """The inputs that were checked: shapes of the models that the run will load, its prompts, and its sources by names
    for people (digests of prompts, and the environment's `sources`).
    """

    models: Models
    prompts: PromptSets
    sources: dict[str, str]


def check_inputs(config: Config) -> Inputs:
    """Do the trainer's own checks; only reading all prompts takes time.

    Raises `DataError`, `ConfigError`, `RewardError`, `RewardUnavailable` or `EnvironmentUnavailable`, each saying what
    to do.
    """
    # What is seen at once: the run folder, files, tokenizer, environment, and the sizes of the models.
    folder = Path(config.trainer.default_local_dir)
    require(check_folder(folder))
    parts = check_parts(config)
    for finding in check_templates(config, parts.environment):
        require(finding)
        if finding.level == "warn":
            log.warning("%s: %s; %s", finding.what, finding.found, finding.todo)
    models = models_of(config)
    _check_window(config, models.policy.window)
    require(check_one_checkpoint(config, models, free_bytes(folder)))
    require_weights(config)
    if not config.trainer.val_only:
        require_savable(config, parts.tokenizer)

    # What takes longest comes after what is seen at once, and the environment last: it may not have been started yet.
    with phase("loading the prompts"):
        prompts = load_prompts(config, parts.tokenizer, parts.environment)
    require_embeddings(models, parts.tokenizer, parts.environment, prompts)
    if config.reward.launch is None:
        warn_of_reward(parts.scorer, parts.tokenizer, prompts, parts.environment)
    run_to_end(_check(config, parts.environment, prompts))

    # What a resumed run is compared with.
    found = {"the token ids of the training prompts": prompts.train.ids_digest, VALIDATION_PROMPTS: prompts.val.digest}
    if prompts.test is not None:
        found["the test prompts"] = prompts.test.digest
    return Inputs(models, prompts, found | run_to_end(parts.environment.sources(config)))


def warn_of_reward(
    scorer: Scorer, tokenizer: PreTrainedTokenizerBase, prompts: PromptSets, environment: Environment
) -> None:
    """Try the reward, and log what is suspicious about it. Raises as `try_reward` does."""
    tried = try_reward(scorer, tokenizer, prompts, environment)
    if tried.suspicious is not None:
        log.warning("reward: %s; %s", tried.suspicious, REWARD_TODO)


def check_parts(config: Config) -> Parts:
    """Check what the run reads; the environment is created, but not called yet. Raises like `check_inputs`."""
    data = config.data
    num_prompts = check_files(data.train_files, data.prompt_key)
    for files in (data.val_files, data.test_files):
        if files:
            check_files(files, data.prompt_key)
    scorer = Scorer(config, None)  # here, so that a wrong name or argument is known before a model is loaded
    # A server that the run starts itself cannot be asked yet.
    if config.reward.launch is None:
        scorer.check()
    if has_critic(config):
        _check_critic(config)
    tokenizer = load_policy_tokenizer(config)
    require_prompts(config, data.train_data_num or num_prompts)
    return Parts(tokenizer, make_environment(config, tokenizer), scorer)


def _check_window(config: Config, window: int | None) -> None:
    """Raise ConfigError if the longest sequence of a run does not fit into the model's context window."""
    longest = window_of(config)
    if window is not None and longest > window:
        raise ConfigError(
            f"data.max_prompt_length + data.max_response_length = {longest} tokens, but "
            f"{config.actor_rollout_ref.model.path} was made for {window} (max_position_embeddings; with LongRoPE its "
            "original_max_position_embeddings, beyond which a row depends on those beside it): lower the two"
        )


def _check_critic(config: Config) -> None:
    path = config.critic.model.path
    try:
        load_model_config(path, config.critic.model.trust_remote_code)
    except Exception as error:  # whatever transformers raises for files that it does not like
        raise ConfigError(
            f"algorithm.adv_estimator=gae needs a critic, and critic.model.path={path} is not a model: {error}\n"
            "Set critic.model.path (the policy's own path, say), or use algorithm.adv_estimator=grpo with "
            "actor_rollout_ref.rollout.n_agent=5"
        ) from error
    load_critic_tokenizer(config)


async def _check(config: Config, environment: Environment, prompts: PromptSets) -> None:
    try:
        tools_started = config.retriever.placement == "apart"
        if tools_started:
            await environment.check()
        await try_steps(environment, prompts, tools_started)
    finally:
        await environment.close()
