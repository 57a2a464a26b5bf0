"""The judge against a real server: what it is asked, what its replies are worth, what happens when it fails."""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from e2e_world import free_port
from reward_episodes import written
from scripted_judge import ScriptedJudge, breaks_off, completion, graded_line, judges_on_a_port, refusal, verdict

from search_r1.llm_agent.grammar import SEARCH_R1, Grammar
from search_r1.rewards import chat_endpoint
from search_r1.rewards.component import ComponentReward, Value, make_component
from search_r1.rewards.judge import Judge
from search_r1.rewards.reading import Reading
from verl.config import load_config
from verl.errors import ConfigError, RewardUnavailable, RolloutError
from verl.protocol import Status, Trajectory
from verl.trainer.sampling.scoring import Scorer
from verl.trainer.start_checks.inputs import check_inputs

ONE_ROW = ("data.train_batch_size=1", "actor_rollout_ref.actor.ppo_mini_batch_size=1")

KEY = "sk-3f9a0c5577e1"
GRADES = {"a": 0.25, "b": 1.0, "c": 0.5, "d": 0.0, "e": 0.75}


@pytest.fixture(scope="module")
def url_of() -> Iterator[Callable[[ScriptedJudge], str]]:
    with judges_on_a_port() as url_of:
        yield url_of


@pytest.fixture
def judge_of(url_of) -> Callable[..., Judge]:
    """`judge_of(server, **options)`: a judge that asks this server."""
    return lambda server, **options: Judge(url_of(server), "grader", **options)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_endpoint, "_FIRST_PAUSE_S", 0.1)


@pytest.fixture
def dead_url() -> str:
    return f"http://127.0.0.1:{free_port()}/v1"


def reading(answer: str | None, *targets: str, question: str = "which letter?") -> Reading:
    return Reading((), answer, targets or ("gold",), question)


def measure(judge: Judge, *answers: str | None) -> list[Value]:
    return asyncio.run(judge.measure([reading(answer) for answer in answers]))


def test_scores_come_in_the_order_of_the_answers(judge_of):
    server = ScriptedJudge(0.3, 0.2, 0.1, grades=GRADES)  # the first one asked is answered last
    assert measure(judge_of(server), "a", "b", "c", "d", "e") == [0.25, 1.0, 0.5, 0.0, 0.75]


def test_a_judge_on_this_machine_is_not_asked_through_a_proxy(judge_of, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nothing listens there
    assert measure(judge_of(ScriptedJudge(grades=GRADES)), "a") == [0.25]


def test_equal_answers_are_asked_once_and_no_answer_never(judge_of):
    server = ScriptedJudge(grades=GRADES)
    judge = judge_of(server)
    assert measure(judge, "a", None, "a ", "", " \n", "b", "a") == [0.25, 0, 0.25, 0, 0, 1.0, 0.25]
    assert sorted(server.asked) == ["a", "b"]
    readings = [reading("a"), reading("a", "other"), reading("a", question="another?"), reading("A")]
    assert asyncio.run(judge.measure(readings)) == [0.25, 0.25, 0.25, 0.0]
    assert len(server.asked) == 6  # each of the four is another question; without a cache all are asked again


def test_what_the_judge_is_sent(judge_of):
    server = ScriptedJudge()
    judge = judge_of(server, max_answer_chars=6, max_tokens=77, extra_body={"seed": 3, "temperature": None})
    asyncio.run(judge.measure([reading(" Lune river ", "the Lune", "\u5317\u4eac", question="Which?")]))
    (body,) = server.bodies
    message = body["messages"][0]["content"]
    assert graded_line(message, "question") == "Which?"
    assert graded_line(message, "reference answers") == ["the Lune", "\u5317\u4eac"] and "\u5317\u4eac" in message
    assert graded_line(message, "answer to grade") == "Lune r"
    assert body["response_format"]["json_schema"]["schema"]["required"] == ["reason", "score"]
    others = {name: value for name, value in body.items() if name not in ("messages", "response_format")}
    assert others == {"model": "grader", "max_tokens": 77, "seed": 3}
    measure(judge_of(server), "x")
    assert server.bodies[1]["temperature"] == 0.0
    assert "authorization" not in server.headers[1]


RUBBISH = {
    "prose": "I think it is right.",
    "1.5": verdict(1.5),
    "cut": completion('{"reason": "x", "sc', "length"),
    "cut after it": completion(verdict(1), "length"),
    "no text": completion(None),
    "no completion": refusal(200),
    "bool": completion(verdict(True)),
}


@pytest.mark.parametrize("trouble", RUBBISH.values(), ids=RUBBISH)
def test_rubbish_is_asked_again(judge_of, trouble):
    server = ScriptedJudge(trouble, trouble, grades=GRADES)
    assert measure(judge_of(server, retries=2), "a") == [0.25]
    assert server.asked == ["a"] * 3


def test_rubbish_for_ever_is_no_score(judge_of):
    server = ScriptedJudge(grades=GRADES)
    server.by_answer = dict.fromkeys("xyzuvw", "no idea")
    found = measure(judge_of(server, retries=1, concurrency=1), *"xyzuvw", "b", "x")
    assert found[6] == 1.0  # many bad replies in a row say nothing about the next answer
    for value in (*found[:6], found[7]):
        assert isinstance(value, RewardUnavailable)
        assert "no JSON" in str(value) or "0 JSON objects" in str(value)
    assert [server.asked.count(answer) for answer in "xyzuvwb"] == [2, 2, 2, 2, 2, 2, 1]


@pytest.mark.parametrize(
    ("trouble", "least_s"),
    [
        (refusal(503, Retry_After="1"), 1.0),
        (refusal(429, Retry_After="0.3"), 0.3),
        (refusal(429), 0.05),
        (refusal(502), 0.05),
        (breaks_off(), 0.05),
        (300.0, 1.5),  # longer than timeout_s, which begins before the judge is reached
    ],
    ids=["503 retry-after", "429 retry-after", "429", "502", "breaks off", "slow"],
)
def test_what_may_pass_is_waited_for(judge_of, trouble, least_s):
    server = ScriptedJudge(trouble, grades=GRADES)
    judge = judge_of(server, timeout_s=3.0)
    assert measure(judge, "a") == [0.25]
    assert len(server.times) == 2
    assert least_s <= server.times[1] - server.times[0] < 100.0


def test_the_deadline_and_the_retries_end_the_waiting(judge_of):
    server = ScriptedJudge(refusal(503, "full", Retry_After="600"))
    start = time.monotonic()
    (value,) = measure(judge_of(server, deadline_s=500), "a")
    assert isinstance(value, RewardUnavailable) and time.monotonic() - start < 100.0
    assert "1 requests" in str(value) and "HTTP 503" in str(value) and "full" in str(value)

    server = ScriptedJudge(delay_s=300.0)
    start = time.monotonic()
    (value,) = measure(judge_of(server, timeout_s=0.6, deadline_s=1.2, retries=9), "a")
    assert "no answer to one request" in str(value) and 0.6 <= time.monotonic() - start < 100.0

    start = time.monotonic()
    measure(judge_of(server, timeout_s=400, deadline_s=0.5), "a")  # one request is no longer than the deadline either
    assert time.monotonic() - start < 100.0

    server = ScriptedJudge(*[refusal(502)] * 9)
    (value,) = measure(judge_of(server, retries=1), "a")
    assert "2 requests" in str(value) and len(server.times) == 2


def test_a_judge_that_is_down_scores_nothing_and_is_named(dead_url, monkeypatch):
    monkeypatch.setattr(chat_endpoint, "_FIRST_PAUSE_S", 0.5)
    start = time.monotonic()
    found = measure(Judge(dead_url, "grader", retries=1, concurrency=2), *(str(i) for i in range(200)), None)
    assert time.monotonic() - start < 20.0  # not 100 times one pause after the other
    assert found[-1] == 0.0  # no answer is worth nothing, whoever judges
    assert all(isinstance(value, RewardUnavailable) for value in found[:-1])
    assert f"grader at {dead_url}" in str(found[0]) and "ClientConnectorError" in str(found[0])


def test_a_judge_that_is_down_is_given_up_and_one_that_stumbles_is_not(judge_of):
    server = ScriptedJudge(*[refusal(503)] * 99)
    found = measure(judge_of(server, retries=0, concurrency=1), *"abcdefgh")
    assert len(server.times) == 3 and len({str(value) for value in found}) <= 3
    server = ScriptedJudge(*[refusal(503), refusal(503), "rubbish", refusal(503), refusal(503)], grades=GRADES)
    assert measure(judge_of(server, retries=0, concurrency=1), *"vwxyze")[-1] == 0.75


@pytest.mark.parametrize(("status", "advice"), [(401, "api_key_env"), (402, "no credit"), (404, "/v1"), (307, "url")])
def test_a_wrong_key_or_model_stops_the_run(judge_of, status, advice):
    server = ScriptedJudge(delay_s=300.0)
    server.by_answer["b"] = refusal(status, "Not for you")
    judge = judge_of(server)
    start = time.monotonic()
    with pytest.raises(ConfigError, match=rf"127.0.0.1:\d+/\d+/v1 refused with HTTP {status}: .*Not for you.*{advice}"):
        measure(judge, "a", "b", "c")
    assert time.monotonic() - start < 100.0  # the others are not waited for


@pytest.mark.parametrize("status", [400, 422, 500, 501])
def test_an_endpoint_without_reply_formats_is_asked_without(judge_of, status):
    server = ScriptedJudge(grades=GRADES)
    server.no_format = status
    judge = judge_of(server, concurrency=1)
    assert measure(judge, "a", "b", "c") == [0.25, 1.0, 0.5]
    assert ["response_format" in body for body in server.bodies] == [True, False, False, False]


def test_an_endpoint_that_has_taken_the_reply_format_is_not_asked_without(judge_of):
    server = ScriptedJudge(grades=GRADES)
    server.by_answer["b"] = refusal(500)
    measure(judge_of(server, concurrency=1, retries=1), "a", "b", "c")
    assert server.asked == ["a", "b", "b", "c"]
    assert all("response_format" in body for body in server.bodies)


def test_one_request_that_is_refused_is_one_answer_without_a_score(judge_of):
    server = ScriptedJudge(grades=GRADES)
    server.by_answer = {"a": refusal(400, "content filter"), "c": refusal(422, "too long")}
    found = measure(judge_of(server, concurrency=1), "a", "b", "c")
    assert found[1] == 1.0
    assert "HTTP 400" in str(found[0]) and "content filter" in str(found[0]) and "too long" in str(found[2])
    assert server.asked == ["a", "a", "4", "b", "c"]  # in between: does it answer anything at all?


@pytest.mark.parametrize("status", [403, 413, 414, 431, 451])
def test_one_text_that_a_service_will_not_read_does_not_stop_the_others(judge_of, status):
    server = ScriptedJudge(grades=GRADES)
    judge = judge_of(server, concurrency=1)
    assert measure(judge, "b", "c") == [1.0, 0.5]
    server.by_answer = {"a": refusal(status, "flagged")}
    found = measure(judge, "a", "b", "c")
    assert found[1:] == [1.0, 0.5] and f"HTTP {status}" in str(found[0]) and "flagged" in str(found[0])


def test_a_key_that_was_taken_back_stops_the_run(judge_of):
    server = ScriptedJudge(grades=GRADES)
    judge = judge_of(server, concurrency=1)
    assert measure(judge, "b") == [1.0]
    server.script = [refusal(403, "Not for you")] * 9
    with pytest.raises(ConfigError, match="HTTP 403: .*Not for you.*api_key_env"):
        measure(judge, "a", "c")


def test_an_endpoint_that_refuses_every_request_stops_the_run(judge_of):
    server = ScriptedJudge(*[refusal(400, "max_tokens is not supported")] * 99)
    with pytest.raises(ConfigError, match="max_tokens is not supported.*check model, max_tokens and extra_body"):
        measure(judge_of(server), "a")


def test_no_more_requests_at_a_time_than_allowed(judge_of):
    server = ScriptedJudge(delay_s=0.05, company=3)
    measure(judge_of(server, concurrency=3), *(str(i) for i in range(12)))
    assert (server.most_running, len(server.asked)) == (3, 12)


def test_verdicts_are_kept_on_disk(url_of, tmp_path):
    server = ScriptedJudge("rubbish", grades=GRADES)
    url, cache = url_of(server), str(tmp_path / "deep" / "verdicts.sqlite")
    first = Judge(url, "grader", cache=cache, retries=0, concurrency=1)
    assert isinstance(measure(first, "a", "b")[0], RewardUnavailable)  # the rubbish, which is not kept
    again = Judge(url, "grader", cache=cache, max_tokens=99)
    assert measure(again, "b", "a", "b") == [1.0, 0.25, 1.0]
    assert server.asked == ["a", "b", "a"]
    assert measure(Judge("http://127.0.0.1:9/v1", "grader", cache=cache), "a", "b") == [0.25, 1.0]
    for options in ({"rubric": "partial_credit"}, {"temperature": 0.5}, {"extra_body": {"seed": 1}}):
        num_asked = len(server.asked)
        assert measure(Judge(url, "grader", cache=cache, **options), "a") == [0.25]
        assert len(server.asked) == num_asked + 1
    measure(Judge(url, "other", cache=cache), "a")
    asyncio.run(again.measure([reading("a", "gold", "more"), reading("a", question="why?"), reading("b.")]))
    assert len(server.asked) == 10


def test_a_stored_verdict_that_cannot_be_read_is_asked_for_again(judge_of, tmp_path, caplog):
    server = ScriptedJudge(grades=GRADES)
    judge = judge_of(server, cache=str(tmp_path / "v.sqlite"))
    measure(judge, "a")
    with sqlite3.connect(tmp_path / "v.sqlite") as file:
        file.execute("UPDATE answers SET body = 'nonsense'")
    assert measure(judge, "a") == [0.25] and len(server.asked) == 2
    assert "stored verdict cannot be read" in caplog.text
    with sqlite3.connect(tmp_path / "v.sqlite") as file:
        file.execute("DROP TABLE answers")
    assert measure(judge, "b") == [1.0]
    assert "could not be stored" in caplog.text


def test_the_key_is_sent_and_shown_nowhere(judge_of, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("GRADER_KEY", KEY)
    caplog.set_level(logging.DEBUG)
    server = ScriptedJudge(f"your key is {KEY}", verdict(0.5, f"said {KEY}"))
    judge = judge_of(server, api_key_env="GRADER_KEY", cache=str(tmp_path / "v.sqlite"), concurrency=1, retries=0)
    rubbish, score = measure(judge, "a", "b")
    server.script = [refusal(401, f"{'x' * 260} wrong key: {KEY}")]
    with pytest.raises(ConfigError) as refused:
        measure(judge, "c")
    assert [headers["authorization"] for headers in server.headers] == [f"Bearer {KEY}"] * 3
    assert score == 0.5 and "[api key]" in str(rubbish)
    shown = f"{rubbish} {refused.getrepr(showlocals=False)} {caplog.text} {vars(judge)} {vars(judge._endpoint)}"
    assert KEY not in shown and KEY[:8] not in shown
    assert KEY.encode() not in (tmp_path / "v.sqlite").read_bytes()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": "127.0.0.1:8001/v1"}, "url must look like"),
        ({"url": "http://me:secret@host/v1"}, "without user"),
        ({"url": "http://host/v1?key=1"}, "without user, password or parameters"),
        ({"model": ""}, "model is empty"),
        ({"rubric": "nowhere.txt"}, "no rubric 'nowhere.txt'.*correctness, partial_credit"),
        ({"api_key_env": "NOT_SET_ANYWHERE"}, "set NOT_SET_ANYWHERE in the environment"),
        ({"api_key_env": KEY}, "not the key itself"),
        ({"retries": -1}, "retries"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"concurrency": 0}, "concurrency"),
        ({"no_such": 1}, "no_such"),
    ],
)
def test_options_that_cannot_be_used(options, message):
    with pytest.raises(ConfigError, match=message) as refused:
        make_component("judge", {"url": "http://127.0.0.1:1/v1", "model": "grader"} | options)
    assert KEY not in str(refused.value) and "secret" not in str(refused.value)


def test_a_key_or_a_cache_that_cannot_be_used(monkeypatch, tmp_path):
    monkeypatch.setenv("GRADER_KEY", "two words")
    with pytest.raises(ConfigError, match="GRADER_KEY must be one word"):
        Judge("http://h/v1", "m", api_key_env="GRADER_KEY")
    (tmp_path / "file").write_text("no database, but a text of some length" * 99)
    with pytest.raises(ConfigError, match="cannot use .*file"):
        Judge("http://h/v1", "m", cache=str(tmp_path / "file"))


class JudgeReward(ComponentReward):
    """The judge and nothing else."""

    def __init__(self, url: str, retries: int = 3, grammar: Grammar = SEARCH_R1) -> None:
        super().__init__({"judge": Judge(url, "grader", retries=retries)}, grammar)

    def combine(self, values):
        return 2.0 * values["judge"]


def scorer(tokenizer: Any, url: str, ratio: float) -> Scorer:
    overrides = [
        f"reward.function={__name__}.JudgeReward",
        f"reward.kwargs={{url: '{url}', retries: 0}}",
        f"agent.max_failed_ratio={ratio}",
    ]
    return Scorer(load_config("ppo_trainer", overrides), tokenizer)


def episode(tokenizer: Any, answer: str) -> Trajectory:
    return written(tokenizer, ["gold"], (f"<answer>{answer}</answer>", None), question="which letter?")


def test_in_training_what_cannot_be_judged_is_masked(byte_tokenizer, url_of):
    server = ScriptedJudge(grades=GRADES)
    server.by_answer["b"] = refusal(503, "out of memory")
    url = url_of(server)
    trajectories = [episode(byte_tokenizer, answer) for answer in "abc"]
    found = scorer(byte_tokenizer, url, 0.4)
    assert found.score(trajectories) == [trajectories[0], trajectories[2]]
    assert [trajectory.reward for trajectory in trajectories] == [0.5, None, 1.0]
    assert trajectories[0].reward_components == {"judge": 0.25}
    assert trajectories[1].status is Status.FAILED and "out of memory" in str(trajectories[1].failure)
    assert found.stats == {"reward/unavailable_ratio": pytest.approx(1 / 3)}
    with pytest.raises(RolloutError, match=rf"1 of 3 .*max_failed_ratio=0.3: .*{url}.*out of memory"):
        scorer(byte_tokenizer, url, 0.3).score([episode(byte_tokenizer, answer) for answer in "abc"])


def test_in_training_a_judge_that_is_down_or_misconfigured_stops_the_run(byte_tokenizer, url_of, dead_url):
    with pytest.raises(RolloutError, match="all 2 trajectories failed: .*ClientConnectorError"):
        scorer(byte_tokenizer, dead_url, 1.0).score([episode(byte_tokenizer, "a"), episode(byte_tokenizer, "b")])
    server = ScriptedJudge()
    server.by_answer["a"] = refusal(401)
    with pytest.raises(ConfigError, match="HTTP 401"):
        scorer(byte_tokenizer, url_of(server), 1.0).score([episode(byte_tokenizer, "a")])


def test_a_judge_is_tried_before_a_run(url_of, dead_url):
    server = ScriptedJudge(grades={"4": 1.0})
    scorer(None, url_of(server), 0.1).check()
    assert server.asked == ["4"]
    with pytest.raises(RewardUnavailable, match=dead_url):
        scorer(None, dead_url, 0.1).check()
    with pytest.raises(ConfigError, match="HTTP 404"):
        scorer(None, url_of(ScriptedJudge(refusal(404))), 0.1).check()
    with pytest.raises(ConfigError, match="HTTP 400"):
        scorer(None, url_of(ScriptedJudge(refusal(400), refusal(400))), 0.1).check()


def test_validation_has_a_judge_of_its_own_to_try(url_of, dead_url, tmp_path):
    prompts, server = tmp_path / "prompts.parquet", ScriptedJudge()
    row = {"data_source": "nq", "prompt": [{"role": "user", "content": "Who?"}]}
    pq.write_table(pa.Table.from_pylist([row | {"reward_model": {"ground_truth": {"target": ["x"]}}}]), prompts)
    kwargs = f"reward.kwargs={{url: '{url_of(server)}'}}"
    val_kwargs = f"reward.val_kwargs={{url: '{dead_url}', retries: 0}}"
    files = (f"data.train_files={prompts}", f"data.val_files={prompts}", *ONE_ROW)
    config = load_config("ppo_trainer", [f"reward.function={__name__}.JudgeReward", kwargs, val_kwargs, *files])
    with pytest.raises(RewardUnavailable, match=dead_url):
        check_inputs(config)  # before it looks for the policy's model, which is not there
    assert server.asked == ["4"]


def test_shipped_rubrics_are_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Judge("http://h/v1", "m", rubric="partial_credit", cache="v.sqlite")
    assert os.listdir() == ["v.sqlite"] and Path("v.sqlite").is_file()


def test_the_judge_is_asked_beside_sampling(byte_tokenizer, url_of):
    """Through the trainer's scorer, in its thread; nobody is asked twice."""
    server = ScriptedJudge(grades=GRADES)
    found = scorer(byte_tokenizer, url_of(server), 0.4)
    assert found.train.scores_while_sampling
    groups = [[episode(byte_tokenizer, answer) for answer in pair] for pair in ("ab", "cc")]
    for group in groups:
        found.score_ahead(group)
    trajectories = [*groups[0], *groups[1]]
    assert found.score(trajectories) == trajectories
    assert sorted(server.asked) == ["a", "b", "c"]
    assert [t.reward_components["judge"] for t in trajectories] == [GRADES[answer] for answer in "abcc"]
