"""A whole training on a terminal, as a person watches it: how far it is, how it ends, and how Ctrl-C ends it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from e2e_world import small_run
from terminal import CTRL_C, Screen, TerminalRun

from verl.run import saved_state

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SETTINGS = (
    *("trainer.test_freq=-1", "+trainer.val_before_train=false", "data.val_data_num=4", "trainer.logger=[console]"),
    # A name as long as those that train_*.sh give.
    "trainer.experiment_name=tinywiki-search-r1-grpo-qwen2-em",
)
BAR = re.compile(r"tinywiki-search-\S* [\u2501\u2578\u257a]+ (\d+) of (\d+) steps, (.*)")
LEFT_AND_REWARD = re.compile(r"\d+ (s|min) left, reward \d\.\d{3}")


def bars(screen: Screen) -> list[tuple[int, str]]:
    """The steps that were done, and what stood behind them, of each state of the bar of the run."""
    found = [BAR.match(line.rstrip()) for line in (*screen.redrawn, *screen.lines)]
    return [(int(bar[1]), bar[3]) for bar in found if bar]


def assert_readable(screen: Screen) -> None:
    """Of a run that has ended: whatever comes next on this terminal stands below what the run said."""
    assert screen.unknown == [] and screen.wrapped == [] and not screen.cursor_hidden
    assert "Traceback" not in "\n".join(screen.lines)


def said_behind_the_bar(sent: str) -> list[str]:
    """Lines that came after the bar was left as it is, which are text alone."""
    text = sent.rpartition("\x1b[?25h")[2]
    assert text.endswith("\n") and text.replace("\r\n", "").isprintable(), text
    return text.splitlines()


def test_a_run_to_its_end(tinywiki: Path, policy: Path, tinywiki_url: str, tmp_path: Path) -> None:
    folder, columns = tmp_path / "run", 100
    command = small_run(tinywiki, policy, tinywiki_url, folder, *SETTINGS, "trainer.total_training_steps=2")
    run = TerminalRun(command, tmp_path / "log", columns)
    assert run.end() == 0, run.said[-6000:]
    screen = Screen(columns, run.said)
    assert_readable(screen)
    shown = bars(screen)
    assert shown[0][1].startswith("nothing yet after ")
    assert [done for done, _ in shown] == sorted(done for done, _ in shown)
    between = [text for done, text in shown if done == 1]
    assert any(LEFT_AND_REWARD.search(text) for text in between), between
    assert shown[-1][0] == 2 and "left" not in shown[-1][1] and "reward" in shown[-1][1], "the last one stays"
    steps = [line for line in screen.lines if re.match(r"step [12]/2 \| reward \d\.\d{3} \|", line)]
    assert len(steps) == 2
    done, *where = said_behind_the_bar(run.said)
    assert re.match(r"done: 2 steps in \d+ min \d+ s", done)
    told = {line[2:16].strip(): line[16:] for line in where}
    assert told["reward"].endswith("(step 2)")
    for name, path in (("model", folder / "actor/global_step_2"), ("report", folder / "report.md")):
        assert told[name] == str(path) and path.exists()
    assert told["trajectories"].endswith(f"bin/search-r1 view {folder}")
    assert told["a question"].endswith(f'bin/search-r1 infer --run {folder} --question "..."')


def test_ctrl_c(tinywiki: Path, policy: Path, tinywiki_url: str, tmp_path: Path) -> None:
    """On a narrow terminal, during the second step; the run has saved the first."""
    folder, columns = tmp_path / "run", 80
    steps = ("trainer.total_training_steps=50", "trainer.save_freq=1")
    run = TerminalRun(small_run(tinywiki, policy, tinywiki_url, folder, *SETTINGS, *steps), tmp_path / "log", columns)
    run.wait_until((folder / "state" / "global_step_1").is_dir)
    run.press(CTRL_C)
    assert run.end() == 130, run.said[-6000:]
    screen = Screen(columns, run.said)
    assert_readable(screen)
    between = [text for done, text in bars(screen) if done]
    assert any(LEFT_AND_REWARD.search(text) for text in between), between
    words = " ".join(" ".join(screen.lines).split())
    assert "interrupted: finishing what is being written, for at most 20 s" in words
    assert said_behind_the_bar(run.said)[-1] == f"interrupted: {saved_state.how_to_resume(folder)}"
