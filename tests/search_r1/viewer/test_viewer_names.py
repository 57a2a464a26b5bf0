"""Names that somebody may have given: of runs, of files, of metrics, of what a timeline has. All are shown as text."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from urllib.parse import urlencode

import pytest
from playwright.sync_api import Browser, Page, expect
from viewer_world import Episodes, client_of, hostile, river_step, served, write_run, write_step

from verl.tracking.spans import Span
from verl.tracking.timeline import write_timeline

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
    files = [Path(shutil.copy(written, tmp_path / f"{name}.parquet")) for name in NAMES]
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
