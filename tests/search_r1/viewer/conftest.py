from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright
from transformers import PreTrainedTokenizerFast
from viewer_world import Episodes, Searched, hostile, served, write_run, write_step


@pytest.fixture(scope="session")
def episodes(byte_tokenizer: PreTrainedTokenizerFast) -> Episodes:
    return Episodes(byte_tokenizer)


@pytest.fixture(scope="session")
def river_run(tmp_path_factory: pytest.TempPathFactory, episodes: Episodes) -> Path:
    """Read only; a test that adds files makes a run of its own."""
    return write_run(tmp_path_factory.mktemp("runs") / "rivers", episodes)


@pytest.fixture(scope="session")
def hostile_run(tmp_path_factory: pytest.TempPathFactory, episodes: Episodes) -> Path:
    """Each of `hostile` is all that the two trajectories of a group in step 9 say and are about: rows 0 and 1, ...;
    those of the last group say and are about all of them.
    """
    run, trajectories = write_run(tmp_path_factory.mktemp("hostile") / "run", episodes), []
    for number, payload in enumerate(hostile()):
        turns = [Searched(payload, payload, [(payload, "T", payload)]), f"<answer>{payload}</answer>"]
        given = {"components": {payload: 1.0}, "data_source": payload}
        trajectories += [episodes.played(f"g{number}", payload, [payload], turns, 0.0, **given)] * 2
    everything = [Searched(payload, payload, [(payload, "T", payload)]) for payload in hostile()]
    components, question = dict.fromkeys(hostile(), 1.0), " ".join(hostile())
    trajectories += [episodes.played("all", question, hostile(), everything, 0.0, components)] * 2
    write_step(run, episodes, "train", 9, trajectories)
    return run


CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)

expect.set_options(timeout=30_000)  # ms: on a busy machine a page of huge tokens takes a while


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """No longer than its tests: while Playwright runs, no other test of this process can start an event loop."""
    if CHROMIUM is None:
        pytest.skip("there is no Chromium: sudo apt-get install chromium")
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """At its end there must have been no error in its console, and no request that left this machine."""
    opened, errors, away = browser.new_page(viewport={"width": 1280, "height": 900}), list[str](), list[str]()
    opened.on("console", lambda message: errors.append(message.text) if message.type in ("error", "warning") else None)
    opened.on("pageerror", lambda error: errors.append(str(error)))
    local = ("http://127.0.0.1:", "file:", "blob:", "data:")
    opened.on("request", lambda request: None if request.url.startswith(local) else away.append(request.url))
    yield opened
    opened.close()
    assert not errors and not away


@pytest.fixture(scope="session")
def address(river_run: Path) -> Iterator[str]:
    with served(river_run) as url:
        yield url
