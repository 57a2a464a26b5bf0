"""The dashboard in a real browser; and names that somebody may have given, all of which are shown as text."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Literal
from urllib.parse import quote, urlencode

import pytest
from axe_playwright_python.sync_playwright import Axe
from dashboard_world import settings, trained_run
from playwright.sync_api import Browser, FloatRect, Locator, Page, expect
from viewer_world import Episodes, client_of, hostile, river_step, served, write_run, write_step

from verl.tracking.spans import Span, write_timeline

BOTH = quote(json.dumps(["seed1", "fast"]))


@pytest.fixture(scope="module")
def dashboards(tmp_path_factory: pytest.TempPathFactory, episodes: Episodes) -> Iterator[str]:
    """The address of two seeds of one configuration, and of a run with another learning rate."""
    folder = tmp_path_factory.mktemp("dashboard_page")
    for seed in (0, 1):
        trained_run(folder / f"seed{seed}", episodes, seed)
    write_step(folder / "seed1", episodes, "train", 7, river_step(episodes)[:1])
    trained_run(folder / "fast", episodes, 0, config=settings(0, actor_rollout_ref={"actor": {"optim": {"lr": 1e-3}}}))
    with served(folder) as url:
        yield url


def panel(page: Page, key: str) -> Locator:
    return page.locator(f'[data-panel="{key}"]')


def place_of(page: Page, key: str) -> FloatRect:
    """Where the panel's curves are on the screen."""
    over = panel(page, key).locator(".u-over")
    over.scroll_into_view_if_needed()
    box = over.bounding_box()
    assert box
    return box


def legend(page: Page, key: str) -> Locator:
    return panel(page, key).locator(".u-legend .line .u-label")


def test_curves_of_a_run_and_of_several(page: Page, dashboards: str) -> None:
    page.goto(f"{dashboards}/#run=seed0")
    page.get_by_role("link", name="Dashboard").click()
    expect(legend(page, "val_exact_match")).to_have_text(["val mouths", "val rivers"])
    expect(legend(page, "phases")).to_have_text(["gen", "update_actor", "weight_sync"])
    for key in ("reward", "searches", "kl", "entropy", "throughput", "retriever_rate", "retriever_latency"):
        expect(panel(page, key).locator("canvas")).to_be_visible()
    page.get_by_text("Compare with (0)").click()
    page.get_by_label("seed1", exact=True).check()
    page.get_by_label("fast", exact=True).check()
    expect(legend(page, "reward")).to_have_text(["critic/score/mean, seed0 and 1 more", "critic/score/mean, fast"])
    expect(page.get_by_text("mean and range of 2 runs")).to_be_visible()
    page.get_by_label("Seeds of one configuration").uncheck()
    expect(legend(page, "reward")).to_have_text(
        ["critic/score/mean, seed0", "critic/score/mean, seed1", "critic/score/mean, fast"]
    )
    link = page.url
    page.goto("about:blank")
    page.goto(link)  # in another tab
    expect(legend(page, "reward")).to_have_text(
        ["critic/score/mean, seed0", "critic/score/mean, seed1", "critic/score/mean, fast"]
    )
    expect(page.get_by_label("seed1", exact=True)).to_be_checked()


def test_a_click_on_a_point_opens_the_trajectories_of_its_step(page: Page, dashboards: str) -> None:
    page.goto(f"{dashboards}/#run=seed0&view=dashboard")
    box = place_of(page, "reward")
    # Steps 1 to 12 lie between the two edges.
    page.mouse.click(box["x"] + box["width"] * (3 - 1) / 11, box["y"] + box["height"] / 2)
    expect(page.locator(".total")).to_have_text("1 to 12 of 12")
    expect(page.get_by_label("Step")).to_have_value("3")
    page.go_back()
    box = place_of(page, "reward")
    page.mouse.click(box["x"] + box["width"] * (7 - 1) / 11, box["y"] + box["height"] / 2)
    expect(page.get_by_text("There are no stored trajectories of step 7 (train) of seed0.")).to_be_visible()


def test_a_click_on_the_curve_of_several_seeds_opens_one_that_has_the_step(page: Page, dashboards: str) -> None:
    page.goto(f"{dashboards}/#run=seed0&view=dashboard&with={quote(json.dumps(['seed1']))}")
    expect(legend(page, "reward")).to_have_count(1)
    chart = panel(page, "reward").locator(".chart")
    chart.focus()
    for _ in range(7):
        page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    expect(page.locator(".total")).to_have_text("1 to 1 of 1")
    expect(page.locator("select[name=run]")).to_have_value("seed1")
    expect(page.get_by_label("Step")).to_have_value("7")


def test_the_keyboard_reaches_every_point(page: Page, dashboards: str) -> None:
    page.goto(f"{dashboards}/#run=seed0")
    expect(page.locator(".total")).to_be_visible()
    page.keyboard.press("d")
    chart = panel(page, "val_exact_match").locator(".chart")
    chart.focus()
    page.keyboard.press("ArrowRight")
    told = panel(page, "val_exact_match").locator(".told")
    expect(told).to_have_text(re.compile(r"step 4, val mouths: [\d.]+"))
    page.keyboard.press("ArrowDown")
    expect(told).to_have_text(re.compile(r"step 4, val rivers: [\d.]+"))
    page.keyboard.press("End")
    expect(told).to_have_text(re.compile(r"step 12, val rivers: [\d.]+"))
    page.keyboard.press("Home")
    page.keyboard.press("Enter")
    expect(page.locator(".total")).to_have_text("1 to 1 of 1")
    expect(page.get_by_label("Kind")).to_have_value("val")


def test_values_as_a_table_and_alarms_as_a_list(page: Page, dashboards: str) -> None:
    page.goto(f"{dashboards}/#run=seed0&view=dashboard")
    panel(page, "kl").get_by_text("Values").click()
    expect(panel(page, "kl").locator(".values tbody tr")).to_have_count(12)
    expect(panel(page, "kl").locator(".values tbody tr").nth(4)).to_have_text(re.compile("5.*0.0050"))
    alarms = page.get_by_role("region", name="Alarms")
    expect(alarms.locator("li")).to_have_text(["seed0, step 11: min_reward for 2 steps"])


def test_a_zoom_is_of_all_charts_and_in_the_link(page: Page, dashboards: str) -> None:
    page.goto(f"{dashboards}/#run=seed0&view=dashboard")
    box = place_of(page, "kl")
    page.mouse.move(box["x"] + box["width"] * 0.3, box["y"] + 50)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.7, box["y"] + 60, steps=4)
    page.mouse.up()
    reset = page.get_by_role("button", name="All steps")
    expect(reset).to_have_text("All steps (now 5 to 8)")
    page.reload()
    expect(reset).to_have_text("All steps (now 5 to 8)")
    reset.click()
    expect(reset).to_have_count(0)
    assert "from=" not in page.url


def test_the_timeline_of_a_step(page: Page, dashboards: str) -> None:
    page.goto(f"{dashboards}/#run=seed0&view=dashboard&timeline=2")
    timeline = page.get_by_role("region", name="Timeline of a step")
    expect(timeline.locator("select")).to_have_value("2")
    expect(timeline.locator(".who")).to_have_text(["driver", "engine 0", "actor 0", ""])
    gen = timeline.locator(".span", has_text=re.compile("^gen$"))
    whole = timeline.locator(".spans").first
    assert gen.evaluate("one => one.offsetWidth") == pytest.approx(whole.evaluate("one => one.offsetWidth") / 2, abs=1)
    timeline.get_by_text("Sums").click()
    expect(timeline.locator("tbody tr").nth(4)).to_have_text(re.compile("engine 0.*generate.*2.*1.250"))


def test_a_step_that_comes_is_drawn(page: Page, tmp_path: Path, episodes: Episodes) -> None:
    run = trained_run(tmp_path / "live", episodes)
    with served(run) as url:
        page.goto(f"{url}/#view=dashboard")
        expect(page.locator(".runs")).to_have_text("live: step 12")
        panel(page, "reward").get_by_text("Values").click()
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 13, "critic/score/mean": 0.4321}) + "\n")
        expect(page.locator(".runs")).to_have_text("live: step 13")
        expect(panel(page, "reward").locator(".values tbody tr").last).to_have_text(re.compile("13.*0.4321"))
        page.goto("about:blank")


def test_a_run_that_has_just_begun(page: Page, tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    (tmp_path / "new/config.yaml").write_text("trainer: {seed: 0}\n")
    (tmp_path / "new/metrics.jsonl").touch()
    with served(tmp_path / "new") as url:
        page.goto(f"{url}/#view=dashboard")
        expect(page.get_by_text("No metrics yet")).to_be_visible()
        page.goto("about:blank")


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (400, "dark")])
def test_it_is_accessible_and_fits(page: Page, dashboards: str, width: int, scheme: Literal["light", "dark"]) -> None:
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": width, "height": 900})
    page.goto(f"{dashboards}/#run=seed0&view=dashboard&with={BOTH}")
    expect(legend(page, "reward")).to_have_count(2)
    expect(page.locator(".span").first).to_be_visible()
    panel(page, "kl").get_by_text("Values").click()
    found = Axe().run(page).response["violations"]
    assert not [one["id"] for one in found if one["impact"] in ("serious", "critical")], found
    assert page.evaluate("document.documentElement.scrollWidth") <= width


NAMES = [payload.replace("/", "\u2044")[:60] for payload in hostile()]
HARM = "main script, main img, main svg, main a[href^=javascript], header script, header img, header svg"


def hostile_run(folder: Path, episodes: Episodes) -> Path:
    """Metrics, data sources and processes of a timeline that are named by all payloads."""
    run = write_run(folder, episodes)
    rows = [
        {"step": step, "critic/score/mean": 0.1 * step}
        | {f"reward/{name}": 0.5 for name in hostile()}
        | {f"val/test_score/{name}": 0.25 for name in hostile()}
        | {f"timing_s/{name}": 1.0 for name in hostile()}
        for step in (1, 2)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for step in (1, 2):
        write_timeline(run, step, {name: [Span(name, 1.0, 2.0), Span("step", 0.0, 3.0)] for name in hostile()})
    return run


@pytest.fixture(scope="module")
def harmless(tmp_path_factory: pytest.TempPathFactory, episodes: Episodes) -> Path:
    folder = tmp_path_factory.mktemp("names")
    first = hostile_run(folder / NAMES[0], episodes)
    for name in NAMES[1:]:
        shutil.copytree(first, folder / name)
    return folder


def no_harm(page: Page) -> None:
    assert page.evaluate("window.hacked") is None
    assert page.locator(HARM).count() == 0


@pytest.mark.timeout(900)
def test_names_stay_text(page: Page, harmless: Path) -> None:
    """Each in one of three views; on the dashboard they are all at once in the legends."""
    views = {"list": NAMES[::3], "trajectory&file=train_step_1&row=1": NAMES[1::3], "compare": NAMES[2::3]}
    with served(harmless) as url:
        for view, name in ((view, name) for view, names in views.items() for name in names):
            page.goto("about:blank")
            page.goto(f"{url}/#{urlencode({'run': name})}&view={view}")
            expect(page.locator("#app")).to_contain_text(name, use_inner_text=False)
            expect(page.locator("main h2, main table").first).to_be_visible()
            no_harm(page)
        page.goto("about:blank")
        others = {"run": NAMES[0], "with": json.dumps(NAMES[1:]), "seeds": "apart", "view": "dashboard"}
        page.goto(f"{url}/#{urlencode(others)}")
        legend = page.locator('[data-panel="reward"] .u-legend .line .u-label')
        expect(legend).to_have_text([f"critic/score/mean, {name}" for name in NAMES])
        for metric in hostile():
            expect(page.locator("#app")).to_contain_text(f"val {metric[:60]}", use_inner_text=False)
        expect(page.locator(".span").first).to_be_visible()
        no_harm(page)
        page.goto("about:blank")


def test_names_of_single_files_stay_text(page: Page, tmp_path: Path, episodes: Episodes) -> None:
    written = write_step(tmp_path / "run", episodes, "train", 1, river_step(episodes))
    files = [Path(shutil.copy(written, tmp_path / f"{name}.parquet")) for name in NAMES[::3]]
    with served(*files) as url:
        for file in files:
            page.goto("about:blank")
            page.goto(f"{url}/#{urlencode({'run': file.name})}")
            expect(page.locator(".total")).to_have_text("1 to 12 of 12")
            expect(page.locator("#app")).to_contain_text(file.name, use_inner_text=False)
            no_harm(page)
        page.goto("about:blank")


def test_names_that_are_no_unicode(browser: Browser, tmp_path: Path, episodes: Episodes) -> None:
    """On Linux a name is bytes. Such runs are listed, apart from each other, and say why they cannot be read."""
    run = write_run(tmp_path / "run", episodes)
    for byte in (b"\xff", b"\xfe"):
        shutil.copytree(run, os.fsdecode(os.fsencode(tmp_path) + b"/bad" + byte))
    names = [one["name"] for one in client_of(tmp_path).get("/api/runs").json()]
    assert len(set(names)) == 3
    page = browser.new_page()  # its console may have errors: those runs are answered with 404
    with served(tmp_path) as url:
        for name in names:
            page.goto("about:blank")
            page.goto(f"{url}/#{urlencode({'run': name})}")
            if name.startswith("run"):
                expect(page.locator(".total")).to_have_text("1 to 12 of 12")
            else:
                expect(page.get_by_text("rename the folder").first).to_be_visible()
        page.goto("about:blank")
    page.close()
