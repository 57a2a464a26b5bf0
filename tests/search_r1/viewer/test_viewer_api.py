"""The JSON of the viewer, asked as its page does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sequences import in_sequences
from viewer_world import (
    LOIRE,
    QUESTIONS,
    Episodes,
    Searched,
    client_of,
    river_step,
    token_values,
    write_run,
    write_step,
)

from verl.protocol import Segment, Source, Status, Trajectory
from verl.tracking.trajectory_columns import TokenValues
from verl.tracking.trajectory_store import read_trajectories

Ask = Callable[..., Any]


@pytest.fixture(scope="module")
def ask(river_run: Path) -> Iterator[Ask]:
    """What a route of `river_run` answers; its status has to be 200."""
    client = client_of(river_run)

    def get(route: str, **query: Any) -> Any:
        reply = client.get(f"/api/{route}", params={"run": "rivers", **query})
        assert reply.status_code == 200, reply.text
        return reply.json()

    yield get


def places(page: dict[str, Any]) -> list[tuple[str, int]]:
    return [(row["file"], row["row"]) for row in page["rows"]]


def test_runs_and_their_files(ask: Ask, river_run: Path) -> None:
    (run,) = ask("runs")
    assert (run["name"], run["path"]) == ("rivers", str(river_run))
    assert [(file["kind"], file["step"]) for file in run["files"]] == [("train", 1), ("train", 2), ("val", 2)]


def test_a_page_of_the_list(ask: Ask) -> None:
    page = ask("rows", kind="train", step=1, limit=5, offset=1)
    assert page["total"] == 12
    assert places(page) == [("train_step_1", row) for row in range(1, 6)]
    first = page["rows"][0]
    assert (first["reward"], first["num_searches"], first["status"]) == (0.1, 1, "answered")
    assert (first["question"], first["answer"]) == (QUESTIONS[0], "Seine")
    assert first["reward_components"] == {"exact_match": 0.0, "has_answer": 1.0}


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ({"min_reward": 0, "max_reward": 0}, {2, 4, 5, 6, 7}),
        ({"min_reward": 1}, {0, 8, 9, 10, 11}),
        ({"component": "has_answer", "max_component": 0.5}, {2}),
        ({"component": "exact_match", "min_component": 1}, {0, 8, 9, 10, 11}),
        ({"source": "rivers"}, {0, 1, 2, 3}),
        ({"status": "failed"}, {3}),
        ({"min_searches": 1}, {0, 1}),
        ({"max_searches": 0, "source": "rivers"}, {2, 3}),
        ({"text": "SEINE"}, {1, 8, 9, 10, 11}),
        ({"question": "rhone"}, {4, 5, 6, 7}),
        ({"question": "100%_"}, set()),
        ({"group": "g2"}, {8, 9, 10, 11}),
    ],
)
def test_filters(ask: Ask, filters: dict[str, Any], expected: set[int]) -> None:
    page = ask("rows", kind="train", step=1, **filters)
    assert {row["row"] for row in page["rows"]} == expected
    assert page["total"] == len(expected)


def test_lengths_are_those_of_the_ids(ask: Ask, river_run: Path) -> None:
    lengths = [len(row["ids"]) for row in read_trajectories(river_run / "trajectories/train_step_1.parquet")]
    page = ask("rows", kind="train", step=1, sort="tokens", descending=True)
    assert [row["num_tokens"] for row in page["rows"]] == sorted(lengths, reverse=True)
    limit = sorted(lengths)[6]
    found = ask("rows", kind="train", step=1, min_tokens=limit)["rows"]
    assert {row["row"] for row in found} == {row for row, length in enumerate(lengths) if length >= limit}


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("sort", ["reward", "component"])
def test_an_order_has_rows_without_a_value_at_its_end(ask: Ask, sort: str, descending: bool) -> None:
    page = ask("rows", kind="train", step=1, sort=sort, component="exact_match", descending=descending)
    values = [
        row["reward"] if sort == "reward" else row["reward_components"].get("exact_match") for row in page["rows"]
    ]
    assert values[-1] is None
    assert values[:-1] == sorted(values[:-1], reverse=descending)


def test_pages_of_equal_values_have_each_row_once(ask: Ask) -> None:
    pages = [ask("rows", sort="status", limit=7, offset=offset) for offset in range(0, 25, 7)]
    assert len({place for page in pages for place in places(page)}) == pages[0]["total"] == 25


def test_what_there_is_to_choose_from(ask: Ask) -> None:
    assert ask("facets", kind="train", step=1) == {
        "sources": {"mouths": 8, "rivers": 4},
        "statuses": {"answered": 10, "failed": 1, "turn_limit": 1},
        "components": {"exact_match": 11, "has_answer": 11},
    }


def test_data_sources_to_choose_from_are_in_the_order_of_their_numbers(episodes: Episodes, tmp_path: Path) -> None:
    run = write_run(tmp_path / "rivers", episodes)
    hops = [episodes.played("g", "Q?", ["a"], ["a"], 1.0, data_source=f"{hops}hop") for hops in (10, 9, 8)]
    write_step(run, episodes, "train", 3, hops)
    found = client_of(run).get("/api/facets", params={"run": "rivers", "kind": "train", "step": 3}).json()
    assert list(found["sources"]) == ["8hop", "9hop", "10hop"]


def test_the_tokens_are_those_of_the_file(ask: Ask, river_run: Path) -> None:
    stored = read_trajectories(river_run / "trajectories/train_step_1.parquet")[1]
    shown = ask("trajectory", file="train_step_1", row=1)
    tokens = shown["tokens"]
    assert tokens["ids"] == stored["ids"] and tokens["mask"] == stored["loss_mask"]
    names = ["log_probs", "old_log_probs", "gap", "kl", "advantages", "weight_version"]
    assert list(tokens["values"]) == names and tokens["values"]["kl"] == stored["kl"]
    assert "".join(tokens["texts"]) == stored["prompt_text"] + stored["response_text"]
    assert all(segment["exact"] for segment in shown["segments"])


def test_the_parts_of_a_trajectory(ask: Ask) -> None:
    shown = ask("trajectory", file="train_step_1", row=1)
    parts = [
        (part["kind"], "".join(text for text, _ in part["runs"])) for s in shown["segments"] for part in s["parts"]
    ]
    kinds = [kind for kind, _ in parts]
    assert kinds == ["text", "think", "search", "information", "think", "answer"]
    assert parts[2][1] == "<search>longest river of France</search>"
    golden = [text for s in shown["segments"] for part in s["parts"] for text, is_gold in part["runs"] if is_gold]
    assert golden == ["Loire", "Loire"]  # title and text of the passage


def parts_of(shown: dict[str, Any], source: str) -> list[tuple[str, str]]:
    return [
        (part["kind"], "".join(text for text, _ in part["runs"]))
        for segment in shown["segments"]
        for part in segment["parts"]
        if segment["source"] == source
    ]


@pytest.mark.parametrize("moves_replies", [False, True])
def test_a_context_shifts_no_turn(tmp_path: Path, episodes: Episodes, moves_replies: bool) -> None:
    """Turns, searches, explanation and values of the tokens are those of the rollout that was not cut."""
    searched = Searched("I look it up", "longest river of France", [LOIRE])
    turns = [searched, "hm", searched, "<think>so</think><answer>Seine</answer>"]
    whole = episodes.played("g0", QUESTIONS[0], ["Loire"], turns, 0.0)
    cut = in_sequences(whole, 3, 5, 7, moves_replies=moves_replies)
    run = write_run(tmp_path / "rivers", episodes)
    write_step(run, episodes, "train", 3, [whole, cut], token_values([whole, cut]))
    client = client_of(run)
    one, several = (
        client.get("/api/trajectory", params={"run": "rivers", "file": "train_step_3", "row": row}).json()
        for row in (0, 1)
    )
    assert parts_of(several, "policy") == parts_of(one, "policy")
    replies = [kind for kind, _ in parts_of(one, "environment")]
    assert replies == ["information", "feedback", "information"]
    assert [kind for kind, _ in parts_of(several, "environment")] == ([] if moves_replies else replies)
    for name in ("searches", "why", "answer", "num_turns", "num_searches", "num_policy_tokens"):
        assert several[name] == one[name], name
    assert several["num_tokens"] == cut.num_tokens

    # A context is text of its own kind, and none of its tokens has a value.
    contexts = [segment for segment in several["segments"] if segment["source"] == "context"]
    assert [[part["kind"] for part in segment["parts"]] for segment in contexts] == [["text"]] * 3
    tokens = several["tokens"]
    for segment in contexts:
        start, end = segment["span"]
        assert segment["exact"] and not any(tokens["mask"][start:end])
        assert all(value[start:end] == [None] * (end - start) for value in tokens["values"].values())
    sampled = [value for value in tokens["values"]["log_probs"] if value is not None]
    assert sampled == [value for segment in whole.segments for value in segment.log_probs or ()]


def test_a_reply_after_a_context_is_that_of_a_turn_without_tokens(tmp_path: Path, episodes: Episodes) -> None:
    searched = Searched("I look it up", "longest river of France", [LOIRE])
    cut = episodes.played("g0", QUESTIONS[0], ["Loire"], [searched, "hm"], 0.0)
    prompt, search, found, _, feedback = cut.segments
    cut.segments = [prompt, search, Segment(Source.CONTEXT, prompt.ids + found.ids), feedback]
    write_step(tmp_path / "rivers", episodes, "train", 1, [cut])
    query = {"run": "rivers", "file": "train_step_1", "row": 0}
    shown = client_of(tmp_path / "rivers").get("/api/trajectory", params=query).json()
    assert [kind for kind, _ in parts_of(shown, "environment")] == ["feedback"]


def test_rewards_of_turns_stand_beside_their_turns(tmp_path: Path, episodes: Episodes) -> None:
    given, plain = river_step(episodes)[:2]
    given.turn_rewards = (0.25, 0.0)
    write_step(tmp_path / "rivers", episodes, "train", 1, [given, plain])

    def rewards(row: int) -> list[float | None]:
        query = {"run": "rivers", "file": "train_step_1", "row": row}
        shown = client_of(tmp_path / "rivers").get("/api/trajectory", params=query).json()
        return [segment.get("reward") for segment in shown["segments"]]

    assert rewards(0) == [None, 0.25, None, 0.0] and rewards(1) == [None] * 4


def test_a_saved_file_shows_sequences_in_order(tmp_path: Path, episodes: Episodes) -> None:
    whole = river_step(episodes)[1]
    cut = in_sequences(whole, 3)
    write_step(tmp_path / "rivers", episodes, "train", 1, [whole, cut])
    client = client_of(tmp_path / "rivers")
    one, several = (
        client.get("/api/export", params={"run": "rivers", "file": "train_step_1", "row": row}).text for row in (0, 1)
    )
    assert "Sequence" not in one and "<summary class" not in one
    order = [
        several.index(text)
        for text in ("Sequence 1 of 2", "&lt;/search", "Sequence 2 of 2", "<summary", "&lt;answer&gt;Seine")
    ]
    length = sum(len(segment.ids) for segment in whole.segments[:3])
    assert f">context, {length} tokens</summary>" in several and order == sorted(order)


def test_the_list_reads_responses_without_contexts(tmp_path: Path, episodes: Episodes) -> None:
    """Text filters and endings are about what was written, lengths about all tokens."""
    whole = river_step(episodes)[1]
    cut = in_sequences(whole, 3)
    write_step(tmp_path / "rivers", episodes, "train", 1, [whole, cut])
    client = client_of(tmp_path / "rivers")

    def rows(**query: Any) -> list[int]:
        page = client.get("/api/rows", params={"run": "rivers", "kind": "train", **query}).json()
        return sorted(row["row"] for row in page["rows"])

    assert rows(text="Seine") == [0, 1] and rows(text="Question:") == []
    assert rows(min_tokens=whole.num_tokens + 1) == [1] and rows(max_tokens=whole.num_tokens) == [0]


def test_why_a_wrong_answer_got_its_reward(ask: Ask) -> None:
    shown = ask("trajectory", file="train_step_1", row=1)
    assert shown["why"] == [
        'The answer is "seine" after normalisation, and not "loire".',
        "A gold answer is in passage 1 of search 1.",
    ]
    assert [(one["name"], one["value"], one["weight"]) for one in shown["components"]] == [
        ("exact_match", 0.0, 1.0),
        ("has_answer", 1.0, 0.1),
    ]
    assert shown["components"][0]["text"] == "1 when the answer equals a gold answer after normalisation."
    assert shown["rule"]["text"].startswith("reward = sum of weight x value over the components")


def test_validation_has_its_own_arguments_of_the_reward(ask: Ask) -> None:
    assert ask("trajectory", file="val_step_2", row=0)["rule"]["arguments"] == {"weights": {"exact_match": 1.0}}


@pytest.mark.parametrize(
    ("row", "sentences"),
    [
        (
            2,
            [
                "It ended because its turns were used up.",
                "There is no complete answer in any turn, so nothing could be compared with the gold answers.",
                "No search was executed.",
                "No valid action in turn 1, 2.",
            ],
        ),
        (3, ["It failed and got no reward: the retriever is down."]),
    ],
)
def test_why_there_is_no_reward(ask: Ask, row: int, sentences: list[str]) -> None:
    assert ask("trajectory", file="train_step_1", row=row)["why"] == sentences


def test_passages_with_their_ids(ask: Ask) -> None:
    (search,) = ask("trajectory", file="train_step_1", row=0)["searches"]
    assert (search["turn"], search["query"], search["executed"], search["ms"]) == (
        1,
        "longest river of France",
        True,
        2.5,
    )
    assert [(one["id"], one["score"], one["title"]) for one in search["passages"]] == [
        ("17", 12.5, [["Loire", True]]),
        ("18", 11.5, [["Rhone", False]]),
    ]


def test_the_samples_of_a_prompt_with_the_advantages_of_the_file(ask: Ask, river_run: Path) -> None:
    """Here they differ from token to token, as GAE's do: a sample has their mean."""
    group = ask("group", file="train_step_1", group="g0")
    stored = read_trajectories(river_run / "trajectories/train_step_1.parquet")[:4]
    known = [[value for value in row["advantages"] or () if value is not None] for row in stored]
    means = [sum(values) / len(values) if values else None for values in known]
    assert [sample["advantage"] for sample in group["samples"]] == means and means[3] is None and None not in means[:3]
    assert group["formula"] == "the mean over its tokens, as the loss saw them"
    shown = ask("trajectory", file="train_step_1", row=1)["group"]
    assert shown["advantage"] == means[1] and shown["formula"] == group["formula"]


def test_one_advantage_for_all_tokens_is_shown_as_it_is(tmp_path: Path, episodes: Episodes) -> None:
    """With GRPO. 0.1 as float32 is not 0.1, and its mean over seven tokens would be another number again."""
    trajectories = river_step(episodes)[:2]
    lengths = np.array([trajectory.num_tokens for trajectory in trajectories])
    mask_T = np.concatenate([trajectory.loss_mask for trajectory in trajectories])
    value_T = np.repeat([0.1, -0.1], lengths)
    run = write_run(tmp_path / "run", episodes)
    write_step(run, episodes, "train", 3, trajectories, TokenValues([0, 1], lengths, {"advantages": (value_T, mask_T)}))
    reply = client_of(run).get("/api/group", params={"run": "run", "file": "train_step_3", "group": "g0"}).json()
    assert [sample["advantage"] for sample in reply["samples"]] == [float(np.float32(0.1)), float(np.float32(-0.1))]
    assert reply["formula"] == "as the loss saw it"


def test_the_samples_of_a_prompt_of_an_older_file(ask: Ask) -> None:
    group = ask("group", file="train_step_2", group="g0")
    # Rewards 1.1, 0.1, 0: mean 0.4, unbiased std sqrt((0.49 + 0.09 + 0.16) / 2) = 0.6082763
    assert [sample["advantage"] for sample in group["samples"]] == [
        pytest.approx(0.7 / (0.6082762530 + 1e-6)),
        pytest.approx(-0.3 / (0.6082762530 + 1e-6)),
        pytest.approx(-0.4 / (0.6082762530 + 1e-6)),
        None,
    ]
    assert group["formula"] == "(reward - mean) / (std + 1e-6), from the stored rewards"
    shown = ask("trajectory", file="train_step_2", row=1)["group"]
    assert shown["rows"] == [0, 1, 2, 3] and shown["mean_reward"] == pytest.approx(0.4)
    assert shown["advantage"] == group["samples"][1]["advantage"]


def test_of_many_samples_the_first_are_shown_beside_the_numbers_of_all(tmp_path: Path, episodes: Episodes) -> None:
    """64 of 100, in a file without advantages: they are of the whole group, as the trajectory's page has them."""
    run = write_run(tmp_path / "run", episodes)
    rewards = [0.0] * 64 + [1.0] * 36
    samples = [episodes.played("g0", QUESTIONS[0], ["Loire"], ["<answer>Seine</answer>"], reward) for reward in rewards]
    other = episodes.played("g1", QUESTIONS[0], ["Loire"], ["<answer>Loire</answer>"], 1.0)
    write_step(run, episodes, "train", 3, [other, *samples])
    client, place = client_of(run), {"run": "run", "file": "train_step_3"}
    group = client.get("/api/group", params=place | {"group": "g0"}).json()
    assert (len(group["samples"]), group["num_samples"], group["mean_reward"]) == (64, 100, 0.36)
    # unbiased std of 36 ones and 64 zeros: sqrt(100 / 99 * 0.36 * 0.64)
    advantage = pytest.approx(-0.36 / ((100 / 99 * 0.36 * 0.64) ** 0.5 + 1e-6))
    assert {sample["row"]: sample["advantage"] for sample in group["samples"]} == dict.fromkeys(range(1, 65), advantage)
    shown = client.get("/api/trajectory", params=place | {"row": 1}).json()["group"]
    assert (shown["advantage"], shown["mean_reward"], len(shown["rows"])) == (advantage, 0.36, 100)
    # The samples of the question are those of two groups, in each of which an advantage is its own.
    query = {"row": 0, "other_run": "run", "other_file": "train_step_3"}
    question = client.get("/api/question", params=place | query).json()
    assert (len(question["samples"]), question["num_samples"], question["mean_reward"]) == (64, 101, 37 / 101)
    assert [sample["advantage"] for sample in question["samples"]] == [0.0, *[advantage] * 63]


def test_two_steps_compared(ask: Ask) -> None:
    found = ask("compare", file="train_step_1", other_run="rivers", other_file="train_step_2")
    assert (found["total"], found["rose"], found["fell"], found["stayed"]) == (3, 1, 1, 1)
    assert [(row["question"], row["change"]) for row in found["rows"]] == [
        (QUESTIONS[2], -1.1),
        (QUESTIONS[0], 0.0),
        (QUESTIONS[1], 1.1),
    ]
    best = ask("compare", file="train_step_1", other_run="rivers", other_file="train_step_2", descending=True, limit=1)
    assert [row["question"] for row in best["rows"]] == [QUESTIONS[1]]
    worst = found["rows"][0]
    pair = ask("question", file="train_step_1", row=worst["left_row"], other_run="rivers", other_file="train_step_2")
    assert [(sample["row"], sample["reward"]) for sample in pair["samples"]] == [(row, 0.0) for row in range(8, 12)]


def test_questions_that_only_one_file_has(ask: Ask) -> None:
    found = ask("compare", file="train_step_1", other_run="rivers", other_file="val_step_2")
    assert (found["total"], found["only_left"], found["only_right"]) == (1, 2, 0)


def test_each_question_in_both_files_is_counted_once(tmp_path: Path, episodes: Episodes) -> None:
    """Also one that has no reward in a file; the same rewards in another order are no change."""
    run = write_run(tmp_path / "run", episodes)
    rewards, failed = (0.1, 0.2, 0.3), {"status": Status.FAILED, "failure": "down"}
    assert sum(rewards) != sum(reversed(rewards))

    def sample(question: str, reward: float | None, **changes: Any) -> Trajectory:
        return episodes.played(question, question, ["x"], ["<answer>x</answer>"], reward, **changes)

    left = [*(sample("a", reward) for reward in rewards), sample("b", None, **failed)]
    right = [*(sample("a", reward) for reward in reversed(rewards)), sample("b", 1.0)]
    write_step(run, episodes, "val", 4, left)
    write_step(run, episodes, "val", 5, right)
    query = {"run": "run", "file": "val_step_4", "other_run": "run", "other_file": "val_step_5"}
    found = client_of(run).get("/api/compare", params=query).json()
    counts = {name: found[name] for name in ("total", "rose", "fell", "stayed", "unscored", "only_left", "only_right")}
    assert counts == {"total": 2, "rose": 0, "fell": 0, "stayed": 1, "unscored": 1, "only_left": 0, "only_right": 0}
    assert [(row["question"], row["change"], row["left_reward"]) for row in found["rows"]] == [
        ("a", 0, 0.2),
        ("b", None, None),
    ]
