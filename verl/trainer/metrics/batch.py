"""The numbers a training step and a validation report: plain floats by published name.

What a mean leaves out:
- trajectories with status `failed` (infrastructure) count only in `*/failed_ratio` and in the sampling cost;
- tokens that the environment wrote count only in `response_length/*`, `state_tokens/coverage` and `global_seqlen/*`;
  advantages, returns and values are taken over policy tokens alone, and `policy_length/*` is the response without them.

A name whose mean would be over nothing (no finished trajectory, a tensor that the batch does not have) is left out.
Row letters: `R` rollouts (trajectories), `T` tokens of all rows, `N` policy tokens among them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from verl.agent.formats import CallStatus
from verl.protocol import IS_SUMMARY, Status, TrainBatch, Trajectory, by_number, call_status

BATCH_PHASES = ("old_log_prob", "ref", "values", "adv", "update_critic", "update_actor")
"""Phases whose time grows with all tokens of the batch; `gen` grows with the sampled ones."""
SHOWN_TURNS = 8
"""Turns that have a metric for what they were given."""
_RUN = ("error", "timeout", "not_run")  # how a tool call ends that could be run


def step_metrics(
    trajectories: Sequence[Trajectory],
    batch: TrainBatch | None,
    *,
    seconds: Mapping[str, float] | None = None,
    partitions: Sequence[Sequence[int]] | None = None,
    max_prompt_length: int | None = None,
    policy_T: torch.Tensor | None = None,
    num_sampled_tokens: int | None = None,
) -> dict[str, float]:
    """The metrics of one training step.

    `trajectories`: everything sampled in the step, failed ones included. `batch`: what was trained (None: nothing);
    `advantages`, `returns`, `values`, `rewards` (each [T], reward after the KL penalty) are read where present.
    `policy_T` [T] bool: the batch's policy tokens, if some of them were left out of the losses (None: its loss mask).
    `num_sampled_tokens`: in this step alone (None: all of the trajectories).
    `seconds`: wall-clock seconds by phase (`Timer.seconds`). `partitions`: batch rows of each data-parallel rank, or of
    each group of ranks that share rows (None: unknown, and no `global_seqlen/*`).
    `max_prompt_length` (tokens) adds `prompt_length/clip_ratio`, the share of prompts at that length.

    Raises ValueError for a finished trajectory without a reward.
    """
    metrics = environment_metrics(trajectories) | call_metrics(trajectories)
    metrics |= length_metrics(trajectories, max_prompt_length)
    metrics |= _spread("critic/score", rewards_of(trajectories)) | component_metrics(trajectories, "reward")
    metrics |= turn_reward_metrics(trajectories)
    if batch is not None and len(batch) > 0:
        metrics |= batch_metrics(batch, policy_T)
        if partitions is not None:
            metrics |= balance_metrics(batch.lengths_B.tolist(), partitions)
    if num_sampled_tokens is None:
        num_sampled_tokens = sum(trajectory.num_policy_tokens for trajectory in trajectories)
    return metrics | timing_metrics(seconds or {}, num_sampled_tokens, batch)


def component_metrics(trajectories: Iterable[Trajectory], prefix: str) -> dict[str, float]:
    """The metrics `{prefix}/{component}`: means of the reward's components over trajectories that did not fail."""
    values: dict[str, list[float]] = defaultdict(list)
    for trajectory in finished_ones(trajectories):
        for name, value in trajectory.reward_components.items():
            values[name].append(value)
    return {f"{prefix}/{name}": _mean(column) for name, column in values.items()}


def turn_reward_metrics(trajectories: Iterable[Trajectory]) -> dict[str, float]:
    """The metrics `reward/turn_{k}`: means of what turn k was given, over the trajectories that have one. For the first
    `SHOWN_TURNS` turns, and only where a turn has a reward of its own.
    """
    given = [trajectory.turn_rewards for trajectory in finished_ones(trajectories)]
    if not any(given):
        return {}
    columns = ([turns[k] for turns in given if k < len(turns)] for k in range(SHOWN_TURNS))
    return {f"reward/turn_{k}": _mean(column) for k, column in enumerate(columns) if column}


def environment_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """The metrics `env/*`. An action is a policy turn; finished means answered; only executed valid searches count.

    Means are per trajectory over those that did not fail; `env/failed_ratio` is failed over all.
    `env/number_of_sequences/*` are there only where one of them has more than one sequence (`Trajectory.sequences`);
    `env/number_of_summaries` and `env/ratio_of_valid_summary` only where one of them was asked for a summary.
    """
    finished = finished_ones(trajectories)
    metrics = {"env/failed_ratio": 1 - len(finished) / len(trajectories)} if trajectories else {}
    if not finished:
        return metrics
    num_sequences = [len(t.sequences) for t in finished]
    if max(num_sequences) > 1:
        metrics |= _spread("env/number_of_sequences", num_sequences)
    summaries = [event for t in finished for event in t.events if event.get(IS_SUMMARY)]
    if summaries:
        metrics["env/number_of_summaries"] = len(summaries) / len(finished)
        metrics["env/ratio_of_valid_summary"] = _mean(event["valid"] for event in summaries)
    return (
        metrics
        | _spread("env/number_of_actions", [t.num_turns for t in finished])
        | {
            "env/finish_ratio": _mean(t.status is Status.ANSWERED for t in finished),
            "env/number_of_valid_action": _mean(t.num_valid_actions for t in finished),
            "env/ratio_of_valid_action": _mean(t.num_valid_actions / max(t.num_turns, 1) for t in finished),
            "env/number_of_valid_search": _mean(t.num_searches for t in finished),
        }
    )


def call_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """The metrics `agent/call_status/{status}`: tool calls per trajectory that did not fail, by how they ended; and
    `agent/parallel_calls`: of the turns that call a tool, the share with several calls.

    Empty if none of the trajectories has a turn of a chat model. Other statuses than those of `CallStatus` say how a
    call was run (`verl.agent.tools.CallResult`). Each is there, also where it is 0.
    """
    finished = finished_ones(trajectories)
    turns = _calls_of_turns(finished)
    if not turns:
        return {}
    counts = Counter(call_status(call) for calls in turns for call in calls)
    statuses = dict.fromkeys([*map(str, CallStatus), *_RUN, *counts])
    metrics = {f"agent/call_status/{status}": counts[status] / len(finished) for status in statuses}
    return metrics | {"agent/parallel_calls": _parallel_calls(turns)}


def _calls_of_turns(trajectories: Iterable[Trajectory]) -> list[list[dict[str, Any]]]:
    """The calls of each turn of a chat model, whose event has `calls`; empty for a turn without one."""
    return [event["calls"] for trajectory in trajectories for event in trajectory.events if "calls" in event]


def _parallel_calls(turns: Iterable[Sequence[object]]) -> float:
    several = [len(calls) > 1 for calls in turns if calls]
    return _mean(several) if several else 0.0


def length_metrics(trajectories: Sequence[Trajectory], max_prompt_length: int | None = None) -> dict[str, float]:
    """The metrics of lengths in tokens, over trajectories that did not fail.

    `response_length/*` is everything after the prompt, retrieved text included, without the contexts that further
    sequences begin with; `policy_length/*` is what the policy wrote. `response_length/clip_ratio` is the share that
    ended because of the length limit.
    """
    finished = finished_ones(trajectories)
    if not finished:
        return {}
    prompt_lengths = [t.num_prompt_tokens for t in finished]
    metrics = _spread("response_length", [t.num_response_tokens for t in finished])
    metrics["response_length/clip_ratio"] = _mean(t.status is Status.LENGTH_LIMIT for t in finished)
    metrics |= _spread("policy_length", [t.num_policy_tokens for t in finished])
    metrics |= _spread("prompt_length", prompt_lengths)
    if max_prompt_length is not None:
        metrics["prompt_length/clip_ratio"] = _mean(length >= max_prompt_length for length in prompt_lengths)
    return metrics


def batch_metrics(batch: TrainBatch, policy_T: torch.Tensor | None = None) -> dict[str, float]:
    """`critic/{rewards,advantages,returns,values}`, `critic/vf_explained_var` and `state_tokens/*` of a train batch.

    `critic/rewards` is the sum of a rollout's `rewards` over its policy tokens, or its reward where the batch has none
    (no KL in the reward). `state_tokens/total` counts trained tokens; `coverage` divides by response tokens.
    These two sums are over what was sampled (`policy_T`), and the other means over what was trained (the loss mask).
    """
    # Positions instead of masks: reading by numbers is several times faster.
    trained_N = batch.tokens["loss_mask"].nonzero().squeeze(-1)
    policy_N = trained_N if policy_T is None else policy_T.nonzero().squeeze(-1)
    metrics = _tensor_spread("critic/rewards", _rewards_R(batch, policy_N))
    # A run without a critic has no values, and some estimators give no returns.
    names = (name for name in ("advantages", "returns", "values") if name in batch.tokens)
    found = {name: batch.tokens[name][trained_N] for name in names}
    for name, value_N in found.items():
        metrics |= _tensor_spread(f"critic/{name}", value_N)
    if {"returns", "values"} <= found.keys():
        # 1 for a perfect critic, 0 for one that knows the mean only.
        error, spread = (torch.var(v_N, correction=0) for v_N in (found["returns"] - found["values"], found["returns"]))
        metrics["critic/vf_explained_var"] = float(1 - error / (spread + 1e-8))
    metrics["state_tokens/total"] = float(len(trained_N))
    # A row's response begins with its first policy token: what it begins with is followed by a turn of the policy.
    ends_B = batch.lengths_B.cumsum(0)
    first_B = ends_B.scatter_reduce(0, batch.row_of_token_T[policy_N], policy_N, "amin")
    if num_response_tokens := int((ends_B - first_B).sum()):
        metrics["state_tokens/coverage"] = len(trained_N) / num_response_tokens
    return metrics


def balance_metrics(lengths: Sequence[int], partitions: Sequence[Sequence[int]]) -> dict[str, float]:
    """`global_seqlen/*`: tokens per rank before balancing (rows dealt out in order) and after it (`partitions`).

    `mean` is the tokens of a rank if all had the same.
    """
    after = [sum(lengths[row] for row in part) for part in partitions]
    before = [sum(chunk.tolist()) for chunk in torch.tensor(lengths).tensor_split(len(partitions))]
    return {
        "global_seqlen/min": float(min(before)),
        "global_seqlen/max": float(max(before)),
        "global_seqlen/minmax_diff": float(max(before) - min(before)),
        "global_seqlen/balanced_min": float(min(after)),
        "global_seqlen/balanced_max": float(max(after)),
        "global_seqlen/mean": sum(lengths) / len(partitions),
    }


def timing_metrics(seconds: Mapping[str, float], num_sampled_tokens: int, batch: TrainBatch | None) -> dict[str, float]:
    """`timing_s/{phase}` (s) and `timing_per_token_ms/{phase}` (ms).

    `gen` is divided by the sampled tokens, those of failed trajectories too (they cost time); `BATCH_PHASES` are
    divided by all tokens of the batch. Other phases have no per-token figure.
    """
    metrics = {f"timing_s/{phase}": float(value) for phase, value in seconds.items()}
    num_tokens = {"gen": num_sampled_tokens}
    num_tokens |= dict.fromkeys(BATCH_PHASES, int(batch.lengths_B.sum()) if batch is not None else 0)
    for phase, value in seconds.items():
        if num_tokens.get(phase):
            metrics[f"timing_per_token_ms/{phase}"] = value * 1000 / num_tokens[phase]
    return metrics


def validation_metrics(trajectories: Sequence[Trajectory], prefix: str = "val") -> dict[str, float]:
    """`{prefix}/{quantity}/{data_source}`, and `{prefix}/{quantity}/mean` over all trajectories of all sources.

    Quantities: `test_score` (mean reward), `searches_per_question`, `finish_ratio` (share that answered), and for a
    chat model `parallel_calls` (see `call_metrics`); failed trajectories are left out of all of them.
    `{prefix}/reward/{data_source}/{component}` are means of the reward's components. `num_questions` counts those that
    were scored (`{prefix}/num_questions` is their sum) and `{prefix}/failed_ratio` is failed over all.

    Raises ValueError for a finished trajectory without a reward.
    """
    by_source: dict[str, list[Trajectory]] = defaultdict(list)
    for trajectory in finished_ones(trajectories):
        by_source[trajectory.prompt.data_source].append(trajectory)
    metrics = {f"{prefix}/num_questions": float(sum(len(rows) for rows in by_source.values()))}
    if trajectories:
        metrics[f"{prefix}/failed_ratio"] = _mean(t.status is Status.FAILED for t in trajectories)
    for source in sorted(by_source, key=by_number):
        rows = by_source[source]
        metrics[f"{prefix}/num_questions/{source}"] = float(len(rows))
        metrics |= _validation_means(rows, prefix, source) | component_metrics(rows, f"{prefix}/reward/{source}")
    return metrics | _validation_means(finished_ones(trajectories), prefix, "mean")


def _validation_means(finished: Sequence[Trajectory], prefix: str, name: str) -> dict[str, float]:
    if not finished:
        return {}
    metrics = {
        f"{prefix}/test_score/{name}": _mean(rewards_of(finished)),
        f"{prefix}/searches_per_question/{name}": _mean(t.num_searches for t in finished),
        f"{prefix}/finish_ratio/{name}": _mean(t.status is Status.ANSWERED for t in finished),
    }
    if turns := _calls_of_turns(finished):
        metrics[f"{prefix}/parallel_calls/{name}"] = _parallel_calls(turns)
    return metrics


def finished_ones(trajectories: Iterable[Trajectory]) -> list[Trajectory]:
    """The trajectories that did not fail."""
    return [t for t in trajectories if t.status is not Status.FAILED]


def rewards_of(trajectories: Iterable[Trajectory]) -> list[float]:
    """The rewards of the trajectories that did not fail. Raises ValueError for one without a reward."""
    scores = []
    for trajectory in finished_ones(trajectories):
        if trajectory.reward is None:
            raise ValueError(
                f"trajectory of group {trajectory.group_id} ({trajectory.status}) has no reward yet: score it first"
            )
        scores.append(trajectory.reward)
    return scores


def _rewards_R(batch: TrainBatch, policy_N: torch.Tensor) -> torch.Tensor:
    if "rewards" not in batch.tokens:
        return batch.of_rollouts(batch.rows["reward"])
    reward_N = batch.tokens["rewards"][policy_N]
    return reward_N.new_zeros(batch.num_rollouts).index_add(0, batch.rollout_of_token_T[policy_N], reward_N)


def _mean(values: Iterable[float]) -> float:
    numbers = [float(value) for value in values]
    return sum(numbers) / len(numbers)


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    return {f"{name}/mean": _mean(values), f"{name}/max": float(max(values)), f"{name}/min": float(min(values))}


def _tensor_spread(name: str, value_N: torch.Tensor) -> dict[str, float]:
    if not len(value_N):
        return {}
    mean = float(value_N.double().mean())
    return {f"{name}/mean": mean, f"{name}/max": float(value_N.max()), f"{name}/min": float(value_N.min())}
