"""The code that the tutorials tell their reader to write does what they say."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from documented_commands import ROOT, files_of
from transformers import PreTrainedTokenizerFast

from search_r1.llm_agent.search_engine import Searcher
from search_r1.llm_agent.templates import load_template
from verl.agent.environment import Outcome
from verl.protocol import Prompt

DOCS = ROOT / "docs"
FILES = {name: content for page in DOCS.rglob("*.md") for name, content in files_of(page.read_text())}
PROMPT = Prompt((), "lighthouses", {"question": "How old is Skarn Light?"})


class Shelf:
    """A search engine with one passage."""

    async def search(self, query: str) -> list[dict[str, Any]]:
        return [{"id": "0", "contents": f'"Skarn Light"\nbuilt in 1871, found by {query}'}]


def names_of(file: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(compile(FILES[file], file, "exec"), names)
    return names


@pytest.fixture
def environment(byte_tokenizer: PreTrainedTokenizerFast) -> Any:
    made = names_of("mine/calculator.py")["SearchAndCalculate"]
    return made(Searcher(Shelf(), 1), byte_tokenizer, 300, "Search, calculate or answer.")


def step(environment: Any, text: str, tools_allowed: bool = True) -> Outcome:
    return asyncio.run(environment.step(PROMPT, text, tools_allowed))


@pytest.mark.parametrize(("asked", "result"), [("3 * (4 + 5)", "27"), ("2026 - 1871", "155"), ("-1 / 4", "-0.25")])
def test_the_calculator_calculates(environment: Any, asked: str, result: str) -> None:
    outcome = step(environment, f"<think>so</think><calculate> {asked} </calculate>")
    assert outcome.valid and not outcome.done and outcome.reply == f"\n<information>{result}</information>\n"


@pytest.mark.parametrize(
    "asked",
    ["", "1 / 0", "1e308 * 1e308 * ", "2 ** 9", "__import__('os').getpid()", "a", "'x' * 9", f"{'9' * 400} * 1"],
)
def test_what_is_no_calculation_is_told_and_not_run(environment: Any, asked: str) -> None:
    outcome = step(environment, f"<calculate>{asked}</calculate>")
    assert not outcome.valid and not outcome.done and "cannot be calculated" in outcome.reply


def test_everything_else_is_the_search_environment(environment: Any) -> None:
    assert {"</calculate>", "</search>", "</answer>"} <= set(environment.stop_strings)
    assert "found by age" in step(environment, "<search> age </search>").reply
    assert step(environment, "<answer> 155 </answer>").done
    assert not step(environment, "<calculate> 1 + 1 </calculate>", tools_allowed=False).valid


def test_the_short_reward_pays_for_short_right_answers() -> None:
    score = names_of("mine/short_reward.py")["compute_score"]
    gold = {"target": ["Josse Aldine"]}
    assert score("lighthouses", "<reply> josse aldine </reply>", gold) == 1.0
    assert score("lighthouses", f"<reply> Josse Aldine {'word ' * 13}</reply>", gold) == pytest.approx(0.9)
    assert score("lighthouses", "<reply> nobody </reply>", gold) == 0.0


@pytest.mark.parametrize("file", ["mine/calculator_prompt.txt", "mine/german.txt"])
def test_a_template_names_its_tags(file: str, tmp_path: Path) -> None:
    path = tmp_path / Path(file).name
    path.write_text(FILES[file])
    template = load_template(str(path))
    assert all(tag in template.text for tag in template.grammar.tags)
