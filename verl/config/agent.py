"""Settings of the episode: the environment, the reward and the retriever."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from verl.config.fields import setting

RetrieverPlacement = Literal["apart", "per_node"]

FEEDBACK = (
    "This turn held neither a search nor an answer. Write one query between search tags, "
    "or the final answer between answer tags."
)


@dataclass
class AgentConfig:
    """The environment that answers the policy's turns."""

    environment: str = setting(
        "search_r1.llm_agent.environment.SearchEnvironment",
        "Dotted name of the environment, a class that derives from verl.agent.environment.Environment.",
    )
    template: str = setting("search_r1", "Name of a prompt template, or path of a template file.", path=True)
    feedback: str = setting(FEEDBACK, "Sentence that answers an invalid turn; it must not contain tags.")
    max_failed_ratio: float = setting(
        0.2, "Share of a step's trajectories that may fail (infrastructure) before the run stops.", ge=0, le=1
    )
    max_redraws: int = setting(2, "Times a prompt is drawn again when its trajectory failed.", ge=0)


@dataclass
class RewardConfig:
    """The rule that scores a trajectory."""

    function: str = setting(
        "search_r1.rewards.exact_match.ExactMatchReward", "Dotted name of the reward, a class or a function."
    )
    kwargs: dict[str, Any] = setting({}, "Keyword arguments of the reward.")
    val_kwargs: dict[str, Any] | None = setting(
        None, "Keyword arguments of the reward in validation; null: those of training."
    )
    launch: str | None = setting(
        None,
        "Command that starts a server which the reward asks, a judge say: for bash, in the folder that the run was "
        "started in. It listens at port, $PORT in the command, and ends with the run. Write {server} where kwargs and "
        "val_kwargs need its host:port.",
    )
    n_gpus: int = setting(
        0,
        "GPUs of one node that are that server's alone, besides those of all roles; 0: it has none, and is on the "
        "driver's node.",
        ge=0,
    )
    port: int = setting(8001, "Port at which that server listens, on its node's address.", ge=1, le=65535)


@dataclass
class RetrieverConfig:
    """The retrieval service."""

    url: str = setting("http://127.0.0.1:8000/retrieve", "Address of the retrieval service.")
    placement: RetrieverPlacement = setting(
        "apart",
        "apart: it is there, at url; per_node: the run starts one on each node that samples, by launch, and ends it.",
    )
    launch: str | None = setting(
        None,
        "With placement=per_node: the command that starts a retriever at url, for bash, in the folder that the run was "
        "started in.",
    )
    engine: str | None = setting(
        None, "Dotted name of a class with search(query), or of a function of a query, asked instead of the service."
    )
    engine_kwargs: dict[str, Any] = setting({}, "Keyword arguments of the engine's class, or of the function.")
    max_concurrent: int = setting(16, "Most calls of a plain engine at once, each in a thread.", ge=1)
    topk: int = setting(3, "Passages per query.", ge=1)
    timeout_s: float = setting(10.0, "Time limit of one HTTP attempt, in seconds.", gt=0)
    deadline_s: float = setting(60.0, "Time limit of one query, with all its attempts, in seconds.", gt=0)
    max_batch: int = setting(64, "Most queries in one HTTP request.", ge=1)
