"""What a reader needs of the page: texts of any length, narrow windows, menus that act, headings that sort."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect
from viewer_world import Episodes, river_step, served, write_run, write_step

from verl.tracking.trajectory_store import read_trajectories

LONG = "Which of the many tributaries of the longest river of France " * 12
GOLDS = [f"golden answer number {number}" for number in range(40)]


@pytest.fixture(scope="module")
def long_url(tmp_path_factory: pytest.TempPathFactory, episodes: Episodes) -> Iterator[str]:
    """A run with two training steps, three validations, and in step 3 long texts and a gold answer of another form."""
    run = write_run(tmp_path_factory.mktemp("long") / "rivers", episodes)
    long = episodes.played("g0", LONG, GOLDS, [f"<answer>{'no ' * 200}</answer>"], 0.0)
    other = episodes.played("g1", "Which country?", [], ["<answer>France</answer>"], 1.0)
    other.prompt.row["reward_model"] = {"ground_truth": '{"answers": ["France", "French Republic"]}'}
    write_step(run, episodes, "train", 3, [long, other])
    for step in (4, 6):
        write_step(run, episodes, "val", step, river_step(episodes, is_later=step > 4))
    with served(run) as url:
        yield url


def chosen(page: Page, name: str) -> str:
    return str(page.locator(f"select[name={name}]").input_value())


def test_the_first_validation_is_compared_with_the_last(page: Page, long_url: str) -> None:
    page.goto(f"{long_url}/#kind=train&step=1")
    page.get_by_role("link", name="Compare").click()
    expect(page.locator(".summary")).to_contain_text("questions in both")
    assert (chosen(page, "left"), chosen(page, "right")) == ("val_step_2", "val_step_6")
    page.goto("about:blank")


def test_without_two_validations_the_first_step_is_compared_with_the_last(page: Page, address: str) -> None:
    page.goto(f"{address}/#view=compare")
    expect(page.locator(".summary")).to_contain_text("3 questions in both")
    assert (chosen(page, "left"), chosen(page, "right")) == ("train_step_1", "train_step_2")


@pytest.mark.parametrize("view", ["compare", "dashboard", "trajectory&file=train_step_1&row=1"])
def test_menus_that_do_nothing_are_not_there(page: Page, address: str, view: str) -> None:
    page.goto(f"{address}/#view={view}")
    expect(page.locator("main h2, main table, main .dashboard").first).to_be_visible()
    expect(page.locator("header select")).to_have_count(1)  # the run
    page.get_by_role("link", name="List", exact=True).click()
    page.get_by_label("Kind").select_option("val")
    expect(page.locator(".total")).to_have_text("1 to 1 of 1")
    page.get_by_label("Kind").select_option("train")
    page.get_by_label("Step").select_option("all")
    expect(page.locator(".total")).to_have_text("1 to 24 of 24")


def test_long_texts_are_cut_with_the_rest_one_click_away(page: Page, long_url: str) -> None:
    page.goto(f"{long_url}/#kind=train&step=3")
    row = page.locator("tbody tr").filter(has_text="tributaries")
    height = row.evaluate("one => one.clientHeight")
    assert height < 150
    expect(row.get_by_role("button", name="more")).to_have_count(3)  # question, gold, answer
    row.get_by_role("button", name="more").first.click()
    expect(row.get_by_role("button", name="less")).to_have_attribute("aria-expanded", "true")
    assert row.evaluate("one => one.clientHeight") > height
    assert "view=trajectory" not in page.url, "the button does not open the row"
    row.get_by_role("link").click()
    expect(page.locator("h2 .clipped")).to_be_visible()
    assert page.locator(".why").evaluate("one => one.clientHeight") < 700
    page.locator(".facts", has_text="gold").get_by_role("button", name="more").last.click()
    expect(page.locator(".facts", has_text="gold")).to_contain_text(GOLDS[-1])
    page.goto("about:blank")


def test_gold_answers_are_no_json(page: Page, long_url: str) -> None:
    page.goto(f"{long_url}/#kind=train&step=3")
    expect(page.locator("tbody tr")).to_have_count(2)
    golds = page.locator("tbody tr td:nth-child(4) .clip")
    expect(golds).to_have_text([" | ".join(GOLDS), "France | French Republic"])
    page.goto("about:blank")


def test_a_narrow_window_folds_the_filters_and_says_that_the_list_scrolls(page: Page, long_url: str) -> None:
    page.set_viewport_size({"width": 390, "height": 800})
    page.goto(f"{long_url}/#kind=train&step=1")
    expect(page.locator(".sideways")).to_be_visible()
    expect(page.get_by_label("Question")).to_be_hidden()
    page.get_by_text("Filters", exact=True).click()
    page.get_by_label("Status").select_option("failed")
    expect(page.locator(".total")).to_have_text("1 to 1 of 1")
    expect(page.locator("summary", has_text="Filters (1 set)")).to_be_visible()
    page.get_by_text("Filters (1 set)").click()
    expect(page.get_by_label("Question")).to_be_hidden()
    page.locator("body").press("/")
    expect(page.locator("input[name=text]")).to_be_focused()
    page.set_viewport_size({"width": 2000, "height": 800})
    expect(page.get_by_text("Filters (1 set)")).to_be_hidden()
    expect(page.get_by_label("Question")).to_be_visible()
    expect(page.locator(".sideways")).to_have_count(0)
    page.goto("about:blank")


IN_ONE_LINE = """() => [...document.querySelectorAll("table.rows th, table.rows td")].filter((cell) => {
  const walk = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT);
  for (let node = walk.nextNode(); node; node = walk.nextNode())
    for (const word of node.data.matchAll(/\\w+/g)) {
      const range = document.createRange();
      range.setStart(node, word.index);
      range.setEnd(node, word.index + word[0].length);
      if (new Set([...range.getClientRects()].map((box) => Math.round(box.top))).size > 1) return true;
    }
  return false;
}).map((cell) => cell.textContent)"""
"""The cells in which a word is broken."""


@pytest.mark.parametrize("view", ["list", "compare"])
def test_no_word_is_broken_in_a_narrow_window(page: Page, long_url: str, view: str) -> None:
    page.set_viewport_size({"width": 390, "height": 800})
    page.goto(f"{long_url}/#kind=train&step=1&view={view}")
    expect(page.locator("table.rows")).to_contain_text("Which")
    assert page.evaluate(IN_ONE_LINE) == []
    page.goto("about:blank")


def test_headings_that_sort_are_buttons_with_an_arrow(page: Page, address: str, river_run: Path) -> None:
    page.goto(f"{address}/#kind=train&step=1")
    headings = page.locator("thead th")
    expect(headings.first).to_be_visible()
    for text in headings.all_inner_texts():
        heading = headings.filter(has_text=re.compile(f"^{re.escape(text)}$"))
        sorts = heading.get_by_role("button").count()
        assert ("\u2195" in text) == bool(sorts) == (text not in ("Components", "Gold", "Answer"))
    page.get_by_role("button", name="Tokens").click()
    expect(page.locator("th[aria-sort]")).to_have_text("Tokens \u25b2")
    lengths = page.locator("tbody td:nth-child(10)")
    stored = read_trajectories(river_run / "trajectories/train_step_1.parquet")
    expect(lengths).to_have_text([str(length) for length in sorted(len(row["loss_mask"]) for row in stored)])


def test_the_change_heading_of_a_comparison_sorts(page: Page, address: str) -> None:
    page.goto(f"{address}/#view=compare&left=train_step_1&right=train_step_2")
    changes = page.locator("tbody tr td:first-child")
    expect(changes).to_have_text(["-1.100", "0", "+1.100"])
    page.get_by_role("button", name="Change").click()
    expect(changes).to_have_text(["+1.100", "0", "-1.100"])
    expect(page.locator("thead button")).to_have_count(1)


def test_a_chart_says_that_it_has_test_curves(page: Page, tmp_path: Path, episodes: Episodes) -> None:
    run = write_run(tmp_path / "run", episodes)
    values = {"val/test_score/rivers": 0.1, "test/test_score/rivers": 0.2, "test/reward/rivers/exact_match": 0}
    (run / "metrics.jsonl").write_text(json.dumps({"step": 1} | values) + "\n")
    with served(run) as url:
        page.goto(f"{url}/#view=dashboard")
        panels = {name: page.locator(f"[data-panel={name}]") for name in ("val_reward", "val_exact_match")}
        expect(panels["val_reward"].locator("figcaption")).to_have_text("Validation and test reward by set")
        expect(panels["val_reward"].locator(".u-legend")).to_contain_text("test rivers")
        expect(panels["val_exact_match"].locator("figcaption")).to_have_text("Validation and test exact match by set")
        page.goto("about:blank")


def test_the_run_that_is_shown_stays_when_another_one_comes(page: Page, tmp_path: Path, episodes: Episodes) -> None:
    """The new one ends alike, so that both have longer names, and comes first."""
    write_run(tmp_path / "nq" / "rl", episodes)
    with served(tmp_path) as url:
        for link in ("#view=trajectory&file=train_step_1&row=1", "#run=rl&view=compare&other_run=rl"):
            page.goto(f"{url}/{link}")
            expect(page.locator("select[name=run]")).to_have_value("rl")
            expect(page.locator("main .why, main .summary").first).to_be_visible()  # nothing is asked by the old name
            write_run(tmp_path / "abc" / "rl", episodes)
            for menu in page.locator("select[name=run], select[name=other_run]").all():
                expect(menu).to_have_value("nq/rl")
            page.goto("about:blank")
            shutil.rmtree(tmp_path / "abc")


def test_a_link_to_a_run_that_is_not_there_shows_no_other(page: Page, address: str) -> None:
    page.goto(f"{address}/#run=gone&view=trajectory&file=train_step_1&row=1")
    expect(page.get_by_role("alert")).to_contain_text("There is no run gone here")
    expect(page.locator("main h2")).to_have_count(0)
    page.locator("select[name=run]").select_option("rivers")
    expect(page.locator(".total")).to_have_text("1 to 12 of 12")


def test_the_list_and_the_comparison_have_pages_of_their_own(page: Page, tmp_path: Path, episodes: Episodes) -> None:
    run = write_run(tmp_path / "rivers", episodes)
    many = [episodes.played(f"g{n}", f"Question {n}?", ["a"], ["<answer>a</answer>"], 1.0) for n in range(110)]
    for step in (3, 4):
        write_step(run, episodes, "train", step, many)
    with served(run) as url:
        page.goto(f"{url}/#run=rivers&kind=train&step=4")
        page.get_by_role("button", name="Next page").click()
        expect(page.locator(".total")).to_have_text("51 to 100 of 110")
        page.goto(f"{page.url}&left=train_step_3&right=train_step_4")
        page.keyboard.press("c")
        expect(page.locator(".total")).to_have_text("1 to 50 of 110")
        for _ in range(2):
            page.get_by_role("button", name="Next page").click()
        expect(page.locator(".total")).to_have_text("101 to 110 of 110")
        page.keyboard.press("u")
        expect(page.locator(".total")).to_have_text("51 to 100 of 110")
        page.goto("about:blank")


def test_what_cannot_be_saved_is_told(browser: Browser, address: str) -> None:
    page = browser.new_page()  # the reply is an error in its console
    page.route("**/api/export?*", lambda route: route.fulfill(status=504, json={"detail": "not answered in time"}))
    page.goto(f"{address}/#run=rivers&view=trajectory&file=train_step_1&row=1")
    page.get_by_role("button", name="Save as HTML").click()
    expect(page.get_by_role("alert")).to_have_text("not answered in time")
    page.unroute("**/api/export?*")
    with page.expect_download():
        page.get_by_role("button", name="Save as HTML").click()
    expect(page.get_by_role("alert")).to_have_count(0)
    page.close()
