"""Settings of the episode: the environment, the reward and the retriever."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from verl.config.sections.fields import count, setting, share

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
        "Dotted name of the environment, a subclass of verl.agent.environment.Environment.",
    )
    program: str | None = setting(
        None,
        "Program that plays the episodes by asking the policy through an endpoint in OpenAI's shape, instead of "
        "environment: dotted name of a coroutine function, or a command with a space in it. null: none.",
    )
    program_serves: bool = setting(
        False,
        "With a command as program: it is started once in each process that samples, and gets a line for each episode; "
        "false: it is started for each episode.",
    )
    program_host: str = setting(
        "127.0.0.1",
        "With program: the address at which the endpoint listens, on a free port. Programs on other machines need one "
        "that they can reach.",
    )
    endpoint: str = setting(
        "search_r1.serve.policy_endpoint.PolicyEndpoint",
        "With program: dotted name of the endpoint, a subclass of verl.agent.program.Endpoint.",
    )
    format: Literal["tags", "chat"] = setting(
        "tags",
        "How the policy acts: tags, one search or answer a turn, as Search-R1; chat, by tool calls in the format of "
        "the model's chat template.",
    )
    tools: list[Any] = setting(
        ["search"],
        "With format=chat: the tools, by name (search, open_page, get_document, calculator), dotted name or entry.",
    )
    thinking: Literal["all", "tool_cycle", "template"] = setting(
        "template",
        "With format=chat: how long thinking stays in the context: all, always; tool_cycle, until a user message "
        "comes; template, as the chat template has it.",
    )
    chat_template_kwargs: dict[str, Any] = setting(
        {}, "With format=chat: variables of the chat template, such as enable_thinking."
    )
    max_calls_per_turn: int | None = count(8, "With format=chat: tool calls that are run in one turn; null: all.")
    max_calls: int | None = count(None, "With format=chat: tool calls that are run in a trajectory; null: all.")
    max_invalid_turns: int | None = count(
        None,
        "With format=chat: a trajectory ends after so many turns in a row without a call that can be run or an answer; "
        "null: it does not.",
    )
    compact_at: int | None = count(
        None,
        "A context of more tokens is replaced by a summary that the policy is asked for and trained on: a further "
        "sequence begins with the prompt, the summary and the latest results. null: none.",
    )
    max_compactions: int = count(8, "Summaries in a trajectory; after them it goes on to the limits of its length.")
    max_summary_length: int | None = count(
        None, "Length of a summary, where it is cut off; null: data.max_response_length."
    )
    train_summaries: bool = setting(
        True,
        "Train the policy on its summaries, too; false: on all of its other turns, to see what that makes of them.",
    )
    summary_request: str | None = setting(
        None, "Sentence that asks for a summary; null: that of the environment, which names the form that it reads."
    )
    template: str = setting("search_r1", "Name of a prompt template, or path of a template file.", path=True)
    tags_in_thoughts: bool = setting(
        False,
        "An opening search or answer tag inside a closed think block opens a query or an answer, as in Search-R1; "
        "false: it is only named there, and opens nothing.",
    )
    feedback: str = setting(FEEDBACK, "Sentence that the policy reads after an invalid turn; it must not contain tags.")
    max_failed_ratio: float = share(
        0.2,
        "Share of a step's trajectories that may fail (retriever, reward service and the like) before the run stops.",
    )
    step_timeout_s: float | None = setting(
        600.0,
        "Maximum wait for one answer of the environment, in seconds; after it the trajectory fails, as if a service "
        "had not answered. null: no limit.",
        gt=0,
    )
    max_redraws: int = setting(2, "How many times a prompt is sampled again after its trajectory failed.", ge=0)


@dataclass
class RewardConfig:
    """The function that scores a trajectory."""

    function: str = setting(
        "search_r1.rewards.exact_match.ExactMatchReward", "Dotted name of the reward, a class or a function."
    )
    kwargs: dict[str, Any] = setting({}, "Keyword arguments of the reward.")
    val_kwargs: dict[str, Any] | None = setting(
        None, "Keyword arguments of the reward in validation; null: same as in training."
    )
    launch: str | None = setting(
        None,
        "Command that starts a server for the reward, such as a judge. bash runs it in the folder where the run was"
        " started, and it is stopped with the run. It must listen at port ($PORT in the command). Write {server} in"
        " kwargs and val_kwargs for its host:port.",
    )
    n_gpus: int = setting(
        0,
        "GPUs that are reserved for that server, on one node, in addition to those of all roles; 0: none, and the "
        "server runs on the driver's node.",
        ge=0,
    )
    port: int = setting(8001, "Port of that server, at the address of its node.", ge=1, le=65535)


@dataclass
class RetrieverConfig:
    """The retrieval service."""

    url: str = setting(
        "http://127.0.0.1:8000/retrieve", "Address of the retrieval service, or several separated by commas."
    )
    placement: RetrieverPlacement = setting(
        "apart",
        "apart: the service is already running at url; per_node: the run starts one on each node that samples, by "
        "launch, and stops it at the end.",
    )
    launch: str | None = setting(
        None,
        "With placement=per_node: the command that starts a retriever at url. bash runs it in the folder where the "
        "run was started.",
    )
    engine: str | None = setting(
        None, "Dotted name of a class with search(query), or of a function of a query, to use instead of the service."
    )
    engine_kwargs: dict[str, Any] = setting({}, "Keyword arguments of the engine's class or function.")
    max_concurrent: int = count(
        16, "Maximum number of concurrent calls of an engine that is not async, each in a thread."
    )
    topk: int = count(3, "Passages per query.")
    timeout_s: float = setting(10.0, "Time limit of one HTTP attempt, in seconds.", gt=0)
    deadline_s: float = setting(60.0, "Time limit of one query, with all its attempts, in seconds.", gt=0)
    max_batch: int = count(64, "Maximum number of queries in one HTTP request.")
