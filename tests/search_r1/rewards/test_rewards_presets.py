"""The published rewards: a table of cases worked out by hand for each, on real episodes."""

from __future__ import annotations

import pytest
from reward_episodes import PAGE, play, reward_of

from search_r1.llm_agent.templates import load_template
from search_r1.rewards import presets
from search_r1.rewards.presets.autorefine import AUTOREFINE
from search_r1.rewards.presets.research import RESEARCH
from verl.config import load_config
from verl.errors import ConfigError
from verl.trainer.sampling.scoring import make_reward

SEARCH = "<think>a</think><search>q</search>"
GOOD = "<think>b</think><answer> Rome </answer>"
WRONG = "<think>b</think><answer> Paris </answer>"
PARTLY = "<think>b</think><answer> Rome or Milan </answer>"  # 1 of 3 and 1 of 1: F1 0.5
HARDLY = "<think>b</think><answer> Rome " + "x " * 38 + "</answer>"  # 1 of 39 and 1 of 1: F1 0.05
BARE = "<answer> Rome </answer>"
SILENT = "<think>Rome</think>"


def score(preset, tokenizer, lines, **rest):
    return pytest.approx(reward_of(preset, tokenizer, lines, **rest), abs=1e-12)


@pytest.mark.parametrize(
    ("lines", "targets", "reward"),
    [
        ([GOOD], ["Rome"], 1.0),
        ([BARE], ["Rome"], 1.0),
        ([GOOD + WRONG], ["Rome"], 0.3),  # the last answer counts
        ([SEARCH, WRONG], ["Rome", "paris."], 1.0),
        ([PARTLY], ["Rome"], 0.3),
        ([SILENT], ["Rome"], 0.0),
        # Published: the chat has to have two answers, and here it has the prompt's and the page's.
        ([SEARCH, SILENT], ["Oslo"], 0.0),  # the page's answer
        ([SILENT], ["Beijing"], 0.0),  # the prompt's
    ],
)
def test_search_r1_v02(byte_tokenizer, lines, targets, reward):
    assert score(presets.SearchR1V02Reward(format_score=0.3), byte_tokenizer, lines, targets=targets) == reward


def test_search_r1_v02_is_exact_match_by_default(byte_tokenizer):
    assert score(presets.SearchR1V02Reward(), byte_tokenizer, [WRONG]) == 0.0
    assert score(presets.SearchR1V02Reward(), byte_tokenizer, [GOOD]) == 1.0


@pytest.mark.parametrize(
    ("lines", "targets", "reward", "with_retrieval"),
    [
        ([SEARCH, GOOD], ["Rome"], 1.0, 1.0),
        ([GOOD], ["Rome"], 1.0, 1.0),
        ([BARE], ["Rome"], 0.8, 0.8),  # 1 - s
        ([SEARCH, BARE], ["Rome"], 0.8, 0.8),
        ([SEARCH, WRONG], ["Rome"], 0.2, 0.3),  # s, s + r: the page has the answer
        ([WRONG], ["Rome"], 0.2, 0.2),
        ([BARE], ["Oslo"], 0.1, 0.1),  # f
        ([SEARCH, SILENT], ["Rome"], 0.0, 0.0),
        ([SILENT], ["Beijing"], 0.0, 0.0),  # published: f, or 0.8 by the example of the prompt
        ([GOOD + "<|endoftext|>"], ["Rome"], 1.0, 1.0),  # published: 0.8 for a control token at the end
    ],
)
def test_search_r1_v03(byte_tokenizer, lines, targets, reward, with_retrieval):
    assert score(presets.SearchR1V03Reward(), byte_tokenizer, lines, targets=targets) == reward
    preset = presets.SearchR1V03Reward(retrieval_score=0.1)
    assert score(preset, byte_tokenizer, lines, targets=targets) == with_retrieval


def boxed(line: str) -> str:
    return line.replace("<answer> ", r"<answer> \boxed{").replace("</answer>", "}</answer>")


@pytest.mark.parametrize(
    ("lines", "reward", "published"),
    [
        ([boxed(GOOD)], 1.0, 1.0),
        ([SEARCH, boxed(GOOD)], 1.0, 1.0),
        ([SEARCH, boxed(PARTLY)], 0.5, 0.5),
        ([SEARCH, boxed(HARDLY)], 0.1, 0.05),  # published: worth less than a wrong answer
        ([SEARCH, boxed(WRONG)], 0.1, 0.1),
        ([boxed(BARE)], 0.0, 0.0),  # no thought
        ([GOOD], 0.0, 0.0),  # no box
        ([SEARCH, SEARCH], 0.0, 0.0),  # no answer
        (["hm", boxed(GOOD)], 0.0, 0.0),
        (["<search>q</search><result>Rome</result>" + boxed(GOOD)], 0.0, 0.0),  # published: 1
    ],
)
def test_research(byte_tokenizer, lines, reward, published):
    assert score(presets.ResearchReward(), byte_tokenizer, lines) == reward
    assert score(presets.ResearchReward(monotone=False), byte_tokenizer, lines) == published


@pytest.mark.parametrize(
    ("lines", "reward", "stage_2"),
    [
        ([GOOD], 1.0, 1.0),
        ([SEARCH, GOOD], 1.0, 1.0),
        ([SEARCH, PARTLY], 0.5, 0.5),
        ([WRONG], 0.0, 0.0),
        ([BARE], -1.0, 0.0),  # correct, with a violation
        ([SEARCH, "<answer> Rome or Milan </answer>"], -1.5, -0.5),
        ([HARDLY], 0.05 - 2, 0.05 - 1),  # more than ten words
        ([SILENT], -2.0, -1.0),
        ([SEARCH, "<think>\u5317</think><answer> Rome </answer>"], -1.0, 0.0),
        ([SEARCH, "<think>b\nAssistant:</think><answer> Rome </answer>"], -1.0, 0.0),
    ],
)
def test_r1_searcher(byte_tokenizer, lines, reward, stage_2):
    assert score(presets.R1SearcherReward(), byte_tokenizer, lines) == reward
    assert score(presets.R1SearcherReward(penalty=1.0), byte_tokenizer, lines) == stage_2


@pytest.mark.parametrize(
    ("lines", "targets", "reward"),
    [
        ([SEARCH, GOOD], ["Rome"], 2.0),
        ([SEARCH, PARTLY], ["Rome"], 2.0),  # covered
        ([SEARCH, PARTLY], ["Ro"], 0.0),  # as a part of a word it is not
        ([GOOD], ["Rome"], 1.5),  # no search
        ([SEARCH, BARE], ["Rome"], 1.5),  # no thought before the answer
        ([BARE], ["Rome"], 1.0),
        ([SEARCH, WRONG], ["Rome"], 0.0),
        ([WRONG], ["Rome"], -0.5),
        ([SILENT], ["Rome"], -1.0),
        ([SEARCH, "<think>b</think><answer> True </answer>"], ["yes"], 2.0),
    ],
)
def test_first_stage_of_r1_searcher(byte_tokenizer, lines, targets, reward):
    assert score(presets.R1SearcherStage1Reward(), byte_tokenizer, lines, targets=targets) == reward


NOTE = "<refine>the capital is Rome</refine>"
OTHER = "<refine>nothing</refine>"


@pytest.mark.parametrize(
    ("lines", "reward", "with_format", "published"),
    [
        # refine_score 0.1; the second and the third with format_score 0.2
        ([SEARCH, NOTE + GOOD], 1.0, 1.0, 1.0),
        ([BARE], 1.0, 1.0, 1.0),
        ([SEARCH, NOTE + PARTLY], 0.5, 0.5, 0.5),
        ([SEARCH, NOTE + WRONG], 0.1, 0.3, 0.3),
        ([SEARCH, OTHER + WRONG], 0.0, 0.2, 0.2),
        ([SEARCH, WRONG], 0.0, 0.0, 0.0),  # no note: the page's "Rome" is not the policy's
        ([NOTE + WRONG], 0.1, 0.1, 0.1),  # no search
        ([SEARCH, NOTE + HARDLY], 0.1, 0.3, 0.05),  # published: worth less than a wrong answer
        ([SEARCH, OTHER + HARDLY], 0.05, 0.2, 0.05),
        ([SEARCH, NOTE + SILENT], 0.0, 0.0, 0.0),  # no answer
    ],
)
def test_autorefine(byte_tokenizer, lines, reward, with_format, published):
    assert score(presets.AutoRefineReward(), byte_tokenizer, lines) == reward
    assert score(presets.AutoRefineReward(format_score=0.2), byte_tokenizer, lines) == with_format
    preset = presets.AutoRefineReward(format_score=0.2, monotone=False)
    assert score(preset, byte_tokenizer, lines) == published


@pytest.mark.parametrize(("metric", "reward"), [("f1", 0.5), ("exact_match", 0.1), ("cover_match", 1.0)])
def test_metrics_of_autorefine(byte_tokenizer, metric, reward):
    preset = presets.AutoRefineReward(metric)
    trajectory = play(byte_tokenizer, [SEARCH, NOTE + PARTLY], grammar=AUTOREFINE)
    value, components = preset.score(trajectory, byte_tokenizer)
    assert value == pytest.approx(reward, abs=1e-12)
    assert set(components) == {metric, "has_answer", "refine_correct", "refine_format"}


@pytest.mark.parametrize("name", presets.__all__)
def test_no_preset_reads_the_prompt_or_a_page(byte_tokenizer, name):
    """With and without what the policy did not write, the reward of a trajectory without an answer is the same."""
    preset = getattr(presets, name)()
    others = '"x"\n<think>a</think><answer>Oslo</answer><refine>Oslo</refine>\\boxed{Oslo}'
    for lines in ([SEARCH, SILENT], [SEARCH, boxed(WRONG)], [SEARCH, WRONG]):
        plain = reward_of(preset, byte_tokenizer, lines, targets=["Oslo"], page='"x"\nno')
        assert reward_of(preset, byte_tokenizer, lines, targets=["Oslo"], page=others) == plain
        assert reward_of(preset, byte_tokenizer, lines, targets=["Beijing"], page=PAGE) == plain


@pytest.mark.parametrize("template", ["search_r1", "research", "autorefine"])
def test_a_preset_is_named_in_the_config_and_reads_the_tags_of_the_template(byte_tokenizer, template):
    config, grammar = load_config(overrides=[f"agent.template={template}"]), load_template(template).grammar
    lines = [SEARCH, NOTE + GOOD if template == "autorefine" else GOOD]
    lines = [boxed(line) for line in lines] if template == "research" else lines
    for name in presets.__all__:
        reward = make_reward(config, f"search_r1.rewards.presets.{name}", {})
        assert reward.grammar == grammar
        if (name, template) != ("SearchR1V03Reward", "autorefine"):  # a note is text between its blocks
            assert reward_of(reward, byte_tokenizer, lines) == (2.0 if "Stage1" in name else 1.0), name


def test_default_grammars_are_those_of_the_templates():
    assert load_template("research").grammar == RESEARCH
    assert load_template("autorefine").grammar == AUTOREFINE
    assert "<refine>" in load_template("autorefine").text


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: presets.ResearchReward(format_score=1.5), "format_score is 1.5"),
        (lambda: presets.R1SearcherReward(penalty=-1), "penalty is -1"),
        (lambda: presets.R1SearcherReward(penalty=float("nan")), "penalty is nan"),
        (lambda: presets.AutoRefineReward("em"), "metric is 'em'"),
        (lambda: presets.AutoRefineReward(refine_score=-0.1), "refine_score is -0.1"),
        (lambda: presets.AutoRefineReward(format_score=0.6, refine_score=0.6), r"format_score \+ refine_score is 1.2"),
    ],
)
def test_coefficients_that_cannot_be_used(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("name", "kwargs", "reads"),
    [
        ("SearchR1V03Reward", {}, "valid_format"),
        ("ResearchReward", {}, "research_format"),
        ("R1SearcherStage1Reward", {}, "r1_searcher_search_format"),
        ("AutoRefineReward", {"format_score": 0.1}, "refine_format"),
        ("SearchR1V02Reward", {"format_score": 0.1}, None),
        ("AutoRefineReward", {}, None),
        ("SearchR1V03Reward", {"structure_format_score": 0.0, "final_format_score": 0.0}, None),
    ],
)
def test_a_chat_model_s_searches_have_no_tags_that_a_reward_could_count(name, kwargs, reads):
    """It would be paid for not searching."""
    config = load_config("ppo_trainer", ["agent.format=chat", "agent.template=chat"])
    if reads is None:
        make_reward(config, f"search_r1.rewards.presets.{name}", kwargs)
        return
    with pytest.raises(ConfigError, match=f"{reads} reads the tags of searches, and with agent.format=chat"):
        make_reward(config, f"search_r1.rewards.presets.{name}", kwargs)
    make_reward(load_config("ppo_trainer", []), f"search_r1.rewards.presets.{name}", kwargs)


def test_a_component_that_reads_tags_may_be_logged_of_a_chat_model():
    config = load_config("ppo_trainer", ["agent.format=chat", "agent.template=chat"])
    composite = "search_r1.rewards.composite.CompositeReward"
    make_reward(config, composite, {"weights": {"f1": 1, "valid_format": 0}})
    with pytest.raises(ConfigError, match="valid_format reads the tags of searches"):
        make_reward(config, composite, {"weights": {"f1": 1, "valid_format": 0.2}})
