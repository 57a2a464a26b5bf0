"""The page in a real browser, on runs that the real store wrote."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from e2e_world import ROOT
from playwright.sync_api import Page, expect
from sequences import in_sequences
from viewer_world import (
    LOIRE,
    QUESTIONS,
    Episodes,
    Searched,
    hostile,
    river_step,
    served,
    token_values,
    write_run,
    write_step,
)

from verl.tracking.trajectory_store import read_trajectories

TRAJECTORY = "#run=rivers&view=trajectory&file=train_step_1&row=1"
VIEWS = {
    "list": "#run=rivers&kind=train&step=1",
    "trajectory": f"{TRAJECTORY}&overlay=log_probs",
    "signs of both kinds": f"{TRAJECTORY}&overlay=advantages",
    "versions": f"{TRAJECTORY}&overlay=weight_version",
    "group": "#run=rivers&view=group&file=train_step_1&of=g0",
    "compare": "#run=rivers&view=compare&left=train_step_1&right=train_step_2",
    "pair": "#run=rivers&view=compare&left=train_step_1&right=train_step_2&pair=0",
}


def total(page: Page, text: str) -> None:
    expect(page.locator(".total")).to_have_text(text)


def test_a_run_is_filtered_and_sorted(page: Page, address: str) -> None:
    page.goto(address)
    total(page, "1 to 12 of 12")
    page.get_by_label("Status").select_option("answered")
    total(page, "1 to 10 of 10")
    page.get_by_label("Question").fill("longest")
    total(page, "1 to 2 of 2")
    page.get_by_role("button", name="Reward", exact=True).click()
    expect(page.locator("tbody tr td:first-child")).to_have_text(["0.100", "1.100"])
    page.get_by_role("button", name="Reward \u25b2").click()
    expect(page.locator("tbody tr td:first-child")).to_have_text(["1.100", "0.100"])
    page.get_by_label("Reward, max").fill("0.5")
    page.get_by_label("Reward, max").press("Enter")
    total(page, "1 to 1 of 1")
    link = page.url
    page.goto("about:blank")
    page.goto(link)  # in another tab
    total(page, "1 to 1 of 1")
    expect(page.get_by_label("Question")).to_have_value("longest")
    page.get_by_role("button", name="Clear filters").click()
    total(page, "1 to 12 of 12")


def test_what_is_typed_stays_while_the_list_is_drawn_anew(page: Page, address: str) -> None:
    page.goto(address)
    total(page, "1 to 12 of 12")
    text = page.get_by_label("Text of the response")
    text.press_sequentially("lo")
    total(page, "1 to 2 of 2")
    shown = page.evaluate(
        """async () => {
          const box = document.querySelector("input[name=text]");
          box.value = "loire";
          box.dispatchEvent(new InputEvent("input", { bubbles: true }));
          dispatchEvent(new HashChangeEvent("hashchange")); // all is drawn anew before the pause in typing
          await new Promise((next) => setTimeout(next)); // which is due earlier than the end of the pause
          return box.value;
        }"""
    )
    assert shown == "loire"
    expect(page).to_have_url(re.compile("text=loire"))


def test_filters_are_cleared_with_the_order_by_a_component(page: Page, address: str) -> None:
    page.goto(address)
    page.get_by_label("Component").select_option("has_answer")
    page.get_by_role("button", name="Sort by has_answer").click()
    page.get_by_role("button", name="Clear filters").click()
    total(page, "1 to 12 of 12")
    expect(page.locator(".problem")).to_have_count(0)
    assert "sort" not in page.url and "descending" not in page.url


def test_a_group_and_one_of_its_samples(page: Page, address: str) -> None:
    """Of a file without stored advantages: they are worked out again."""
    page.goto(f"{address}/#run=rivers&kind=train&step=2")
    page.get_by_role("link", name=QUESTIONS[0]).first.click()
    page.get_by_role("link", name="Group side by side").click()
    expect(page.locator(".sample")).to_have_count(4)
    # (1.1 - 0.4) / 0.608276, (0.1 - 0.4) / 0.608276 and (0 - 0.4) / 0.608276; the failed one has none
    expect(page.locator(".advantage")).to_have_text(["advantage +1.151", "advantage -0.493", "advantage -0.658"])
    page.get_by_role("link", name="Sample 2").click()
    expect(page.locator(".why")).to_contain_text('The answer is "seine" after normalisation, and not "loire".')
    kinds = page.locator(".part").evaluate_all("parts => parts.map(part => part.dataset.kind)")
    assert kinds == ["prompt", "think", "search", "information", "think", "answer"]
    expect(page.locator(".part mark")).to_have_text(["Loire", "Loire"])
    expect(page.locator(".search li").first).to_contain_text("id 17, score 12.500")
    expect(page.locator(".search li").nth(1)).to_contain_text("id 18, score 11.500")


@pytest.mark.parametrize("row", [0, 1, 2])
def test_the_mask_is_that_of_the_file_token_by_token(page: Page, address: str, river_run: Path, row: int) -> None:
    stored = read_trajectories(river_run / "trajectories/train_step_1.parquet")[row]
    page.goto(f"{address}/#run=rivers&view=trajectory&file=train_step_1&row={row}")
    page.get_by_label("loss mask").check()
    expect(page.locator(".token").first).to_be_visible()
    shown = page.locator(".token").evaluate_all(
        "all => all.map(one => [one.dataset.id, one.dataset.mask, one.classList.contains('trained'), one.textContent])"
    )
    assert [int(token) for token, *_ in shown] == stored["ids"]
    assert [trained for _, _, trained, _ in shown] == stored["loss_mask"]
    assert "".join(text for *_, text in shown) == stored["prompt_text"] + stored["response_text"]


def test_the_values_of_a_token(page: Page, address: str, river_run: Path) -> None:
    stored = read_trajectories(river_run / "trajectories/train_step_1.parquet")[1]
    place = stored["loss_mask"].index(True) + 3
    page.goto(f"{address}/{VIEWS['trajectory']}")
    page.locator(f'[data-token="{place}"]').hover()
    expect(page.locator(".tokenline code")).to_contain_text(f"token {place}, id {stored['ids'][place]},")
    told = f"trained, log-prob (sampler) {stored['log_probs'][place]:.4f}"
    expect(page.locator(".tokenline code")).to_contain_text(told)
    page.keyboard.press("ArrowRight")
    expect(page.locator(".tokenline code")).to_contain_text(f"token {place + 1},")


OVERLAYS = {
    "log-prob (sampler)": lambda row: [
        p if trained else None for p, trained in zip(row["log_probs"], row["loss_mask"], strict=True)
    ],
    "log-prob (trainer)": lambda row: row["old_log_probs"],
    "gap (trainer - sampler)": lambda row: [
        None if old is None else old - p for old, p in zip(row["old_log_probs"], row["log_probs"], strict=True)
    ],
    "KL to the anchor": lambda row: row["kl"],
    "advantage": lambda row: row["advantages"],
    "weight version": lambda row: [row["weight_version"] if trained else None for trained in row["loss_mask"]],
}
SHOWN = "all => all.map(t => [t.dataset.id, t.dataset.value, t.className, getComputedStyle(t).backgroundColor])"


@pytest.mark.parametrize("row", [0, 2])
def test_an_overlay_is_that_of_the_file_token_by_token(page: Page, address: str, river_run: Path, row: int) -> None:
    """Numbers, and a colour on exactly those that are not 0, by their sign; the larger, the stronger."""
    stored = read_trajectories(river_run / "trajectories/train_step_1.parquet")[row]
    page.goto(f"{address}/#run=rivers&view=trajectory&file=train_step_1&row={row}")
    for name, values_of in OVERLAYS.items():
        page.get_by_label(name).check()
        expect(page.locator(".legend")).to_contain_text(name)
        shown = page.locator(".token").evaluate_all(SHOWN)
        assert [int(token) for token, *_ in shown] == stored["ids"]
        expected = values_of(stored)
        assert [float(value) if value else None for _, value, *_ in shown] == pytest.approx(expected, abs=1e-12)
        steps = [shade_of(classes) for *_, classes, _ in shown]
        assert [step is None for step in steps] == [value is None for value in expected]
        known = [(value, step) for value, step in zip(expected, steps, strict=True) if step is not None]
        assert known and all(step * value >= 0 for value, step in known)
        ordered = [step for _, step in sorted(known)]
        assert ordered == sorted(ordered) and ordered != [0] * len(ordered)
        colours = {shade_of(classes): colour for *_, classes, colour in shown}
        assert len({colour for step, colour in colours.items() if step}) == len([step for step in colours if step])


def shade_of(classes: str) -> int | None:
    """-6 to 6; None for a token without a number."""
    if "none" in classes.split():
        return None
    found = re.search(r"\b(plus|minus)(\d)", classes)
    return 0 if found is None else int(found[2]) * (1 if found[1] == "plus" else -1)


def test_the_numbers_of_tokens_by_keyboard(page: Page, address: str, river_run: Path) -> None:
    """Tab reaches one token, the arrow keys the others: each shows its number. Around the first one that is trained."""
    stored = read_trajectories(river_run / "trajectories/train_step_1.parquet")[1]
    page.goto(f"{address}/{TRAJECTORY}&overlay=kl")
    page.get_by_label("KL to the anchor").focus()
    page.keyboard.press("Tab")
    told = page.locator(".tokenline code")
    expect(told).to_contain_text(f"token 0, id {stored['ids'][0]},")
    begin = stored["loss_mask"].index(True) - 2
    page.locator(f'[data-token="{begin}"]').focus()
    for place, value in enumerate(stored["kl"][begin : begin + 20], start=begin):
        expect(told).to_contain_text(f"token {place}, id {stored['ids'][place]},")
        expect(page.locator("[data-token]:focus")).to_have_attribute("data-token", str(place))
        text = told.inner_text()
        assert ("KL to the anchor" in text) == (value is not None)
        if value is not None:
            assert f"KL to the anchor {'1.50e-6' if 0 < value < 1e-5 else f'{value:.4f}'}," in text
        page.keyboard.press("ArrowRight")


def test_the_focus_stays_on_the_token_that_was_reached_last(page: Page, address: str) -> None:
    """Also when both are reached before the browser has painted once, as on a busy machine."""
    page.goto(f"{address}/{TRAJECTORY}&overlay=kl")
    page.locator('[data-token="20"]').wait_for()
    page.evaluate("""async () => {
      for (const place of [0, 20]) {
        document.querySelector(`[data-token="${place}"]`).focus();
        await Promise.resolve();
      }
      await new Promise((done) => requestAnimationFrame(() => setTimeout(done, 100)));
    }""")
    expect(page.locator(".tokenline code")).to_contain_text("token 20, ")
    expect(page.locator("[data-token]:focus")).to_have_attribute("data-token", "20")


def test_a_file_of_an_older_run_has_fewer_overlays(page: Page, address: str) -> None:
    page.goto(f"{address}/#run=rivers&view=trajectory&file=train_step_2&row=1&overlay=kl")
    expect(page.locator(".overlays label")).to_have_text(["text", "loss mask", "log-prob (sampler)", "weight version"])
    expect(page.get_by_label("text", exact=True)).to_be_checked()
    page.goto(f"{address}/#run=rivers&view=trajectory&file=train_step_1&row=3&overlay=kl")  # it failed
    expect(page.locator(".overlays label")).to_have_text(["text", "loss mask", "log-prob (sampler)", "weight version"])


def test_the_sequences_of_a_rollout(page: Page, tmp_path: Path, episodes: Episodes) -> None:
    """Each has a heading; a context is folded and grey, and its tokens are passed over until it is opened."""
    run = write_run(tmp_path / "rivers", episodes)
    searched = Searched("I look it up", "longest river of France", [LOIRE])
    turns = [searched, "hm", "<think>It is the Seine</think><answer>Seine</answer>"]
    whole = episodes.played("g0", QUESTIONS[0], ["Loire"], turns, 0.1)
    cut = in_sequences(whole, 3, 5)
    write_step(run, episodes, "train", 3, [cut, whole], token_values([cut, whole]))
    lengths = [sum(len(segment.ids) for segment in one) for one in cut.sequences]
    context = len(cut.sequences[2][0].ids)
    view = "#run=rivers&view=trajectory&file=train_step_3"
    with served(run) as url:
        # Headings, parts and folded contexts, in order.
        page.goto(f"{url}/{view}&row=0")
        transcript = page.locator(".transcript")
        expect(transcript.locator("h4")).to_have_text([f"Sequence {number} of 3" for number in (1, 2, 3)])
        expect(transcript.locator("summary")).to_have_text(
            [f"Context, {len(one[0].ids)} tokens" for one in cut.sequences[1:]]
        )
        kinds = transcript.locator(".part").evaluate_all("parts => parts.map(part => part.dataset.kind)")
        first = ["prompt", "think", "search", "information"]
        assert kinds == [*first, "context", "text", "feedback", "context", "think", "answer"]
        expect(transcript.locator('[data-kind="context"]').first).to_be_hidden()
        transcript.locator("summary").first.click()
        expect(transcript.locator('[data-kind="context"]').first).to_be_visible()
        colours = [
            transcript.locator(place).first.evaluate("one => getComputedStyle(one).color")
            for place in ('[data-kind="context"] .body', ".answer .body")
        ]
        assert colours[0] != colours[1]
        found = Axe().run(page).response["violations"]
        assert [(one["id"], one["nodes"][0]["html"]) for one in found if one["impact"] in ("serious", "critical")] == []

        # Values are shown where they are, and the arrow keys go past a folded context.
        page.goto(f"{url}/{view}&row=0&overlay=log_probs")
        expect(transcript.locator(".token")).to_have_count(sum(lengths))
        values = transcript.locator(".token").evaluate_all("all => all.map(one => one.dataset.value !== '')")
        assert values == cut.loss_mask
        told, last = page.locator(".tokenline code"), lengths[0] + lengths[1] - 1
        transcript.locator(f'[data-token="{last}"]').focus()
        expect(told).to_contain_text(f"token {last}, ")
        transcript.locator(f'[data-token="{last}"]').press("ArrowRight")
        expect(told).to_contain_text(f"token {last + 1 + context}, ")
        transcript.locator(f'[data-token="{last + 1 + context}"]').press("ArrowLeft")
        expect(told).to_contain_text(f"token {last}, ")
        transcript.locator("summary").last.click()
        transcript.locator(f'[data-token="{last}"]').focus()
        page.keyboard.press("ArrowRight")
        expect(told).to_contain_text(f"token {last + 1}, id {cut.ids[last + 1]}, ")
        expect(told).to_contain_text("not trained")

        # Side by side as well; a rollout of one sequence has neither headings nor folds.
        page.goto(f"{url}/#run=rivers&view=group&file=train_step_3&of=g0")
        expect(page.locator(".sample").first.locator("h4")).to_have_count(3)
        expect(page.locator(".sample").last.locator("h4, .transcript details")).to_have_count(0)
        page.goto("about:blank")


def test_two_steps_compared(page: Page, address: str) -> None:
    page.goto(f"{address}/{VIEWS['compare']}")
    expect(page.locator(".summary")).to_contain_text("3 questions in both: 1 rose, 1 fell, 1 stayed")
    expect(page.locator("tbody tr td:first-child")).to_have_text(["-1.100", "0", "+1.100"])
    page.get_by_role("link", name=QUESTIONS[2]).click()
    left, right = (page.get_by_role("region", name=side, exact=True) for side in ("Left", "Right"))
    expect(left.locator(".sample .reward")).to_have_text(["1.100"] * 4)
    expect(right.locator(".sample .reward")).to_have_text(["0"] * 4)


def test_what_a_run_adds_is_shown(page: Page, tmp_path: Path, episodes: Episodes) -> None:
    run = write_run(tmp_path / "live", episodes)
    with served(run) as url:
        page.goto(url)
        expect(page.locator("tbody tr td:last-child").first).to_have_text("2")
        write_step(run, episodes, "train", 3, river_step(episodes)[:5])
        total(page, "1 to 5 of 5")
        expect(page.locator("tbody tr td:last-child").first).to_have_text("3")
        expect(page.locator(".live")).to_have_text("4 files, newest step 3")
        page.goto("about:blank")


def test_a_saved_file_opens_without_a_server(page: Page, tmp_path: Path, river_run: Path) -> None:
    with served(river_run) as url:
        page.goto(f"{url}/{TRAJECTORY}")
        with page.expect_download() as waiting:
            page.get_by_role("button", name="Save as HTML").click()
        assert waiting.value.suggested_filename == "rivers_train_step_1_row1.html"
        waiting.value.save_as(tmp_path / "one.html")
        page.goto("about:blank")
    page.goto((tmp_path / "one.html").as_uri())
    expect(page.locator("h1")).to_have_text(QUESTIONS[0])
    expect(page.locator(".part mark")).to_have_text(["Loire", "Loire"])
    expect(page.locator(".part.answer")).to_contain_text("<answer>Seine</answer>")
    expect(page.locator(".part.think").first).to_have_css("border-left-width", "4px")  # its style is inside


def test_why_is_this_reward_0(page: Page, river_run: Path) -> None:
    """One command, as documented, and at most three clicks."""
    command = [sys.executable, "-m", "search_r1.viewer", str(river_run), "--port", "0"]
    server = subprocess.Popen(command, cwd=ROOT, env=dict(os.environ), stderr=subprocess.PIPE, text=True)
    try:
        assert server.stderr is not None
        said = next(line for line in server.stderr if "serving" in line)
        found = re.search(r"http://\S+", said)
        assert found is not None
        page.goto(found.group())
        page.get_by_role("button", name="Reward 0").click()
        rewards = page.locator("table.rows tbody td:first-child")
        expect(rewards.filter(has_not_text=re.compile(r"^0$"))).to_have_count(0)
        page.get_by_role("link", name=QUESTIONS[0]).first.click()
        expect(page.locator(".why")).to_contain_text("There is no complete answer in any turn")
        page.goto("about:blank")
    finally:
        server.terminate()
        _, last_words = server.communicate(timeout=60)
        assert (server.returncode, last_words) == (0, "")


def test_what_was_stored_stays_text(page: Page, hostile_run: Path) -> None:
    last = 2 * len(hostile())
    views = ["list", "compare", "group&of=all", f"trajectory&row={last}", f"trajectory&row={last}&overlay=loss_mask"]
    with served(hostile_run) as url:
        for view in views:
            page.goto("about:blank")  # so that nothing of the view before is there
            page.goto(f"{url}/#run=run&kind=train&file=train_step_9&view={view}&left=train_step_9&right=train_step_9")
            page.get_by_text("Trajectories").first.wait_for()
            expect(page.locator("#app")).to_contain_text(hostile()[-1][:200], use_inner_text=False)
            text = page.locator("#app").text_content() or ""
            assert [payload for payload in hostile() if payload[:200] not in text] == []
            assert page.evaluate("window.hacked") is None
            assert page.locator("main script, main img, main svg, main a[href^=javascript]").count() == 0
        page.goto("about:blank")


@pytest.mark.parametrize(
    "view",
    # Two with all kinds of elements are for every day.
    [view if view in ("list", "signs of both kinds") else pytest.param(view, marks=pytest.mark.slow) for view in VIEWS],
)
def test_no_serious_barrier_and_a_narrow_window_does_not_scroll_sideways(page: Page, address: str, view: str) -> None:
    page.goto(f"{address}/{VIEWS[view]}")
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        expect(page.locator("main h2, main table").first).to_be_visible()
        found = Axe().run(page).response["violations"]
        assert [(one["id"], one["nodes"][0]["html"]) for one in found if one["impact"] in ("serious", "critical")] == []
    page.set_viewport_size({"width": 400, "height": 800})
    page.reload()
    expect(page.locator("main h2, main table").first).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= 400


def test_keys(page: Page, address: str) -> None:
    page.goto(f"{address}/{VIEWS['list']}")
    total(page, "1 to 12 of 12")
    page.keyboard.press("j")
    expect(page.locator("tr.chosen")).to_contain_text("0.100")
    page.keyboard.press("Enter")
    expect(page.locator(".facts").first).to_contain_text("train_step_1, row 1")
    page.keyboard.press("j")
    expect(page.locator(".facts").first).to_contain_text("train_step_1, row 2")
    page.keyboard.press("o")
    expect(page.get_by_label("loss mask")).to_be_checked()
    page.keyboard.press("g")
    expect(page.locator(".sample")).to_have_count(4)
    page.keyboard.press("u")
    total(page, "1 to 12 of 12")
    page.keyboard.press("/")
    page.keyboard.type("gk")  # letters in a field are no keys
    total(page, "Nothing fits the filters.")
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_contain_text("all samples of the prompt side by side")
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    page.keyboard.press("t")
    expect(page.locator("html")).to_have_attribute("data-theme", "light")


def test_a_server_with_a_token_asks_for_it(browser: Any, river_run: Path) -> None:
    with served(river_run, token="secret") as url:
        page = browser.new_page()  # the refused request is an error in its console
        page.goto(url)
        expect(page.get_by_role("alert")).to_have_count(0)
        for token in ("secrets", "secret\u200b"):  # the second as it may be copied; no header can hold it
            page.get_by_label("Token of this server").fill(token)
            page.get_by_role("button", name="Open").click()
            expect(page.get_by_role("alert")).to_have_text("This is not the token of this server.")
        page.get_by_label("Token of this server").fill("secret")
        page.get_by_role("button", name="Open").click()
        total(page, "1 to 12 of 12")
        assert "secret" not in page.url
        page.close()
