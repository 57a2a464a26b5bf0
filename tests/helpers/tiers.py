"""Which tests run, in which order, with how many examples (a pytest plugin): "Tiers of tests" in CONTRIBUTING.md."""

from __future__ import annotations

import time
from collections import Counter
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from xdist.scheduler import LoadFileScheduling

from verl.process.startup import usable_cores, usable_memory

# An example, or making one up, is slow on a busy machine. The same examples each time: a failure can be repeated.
UNTIMED = hypothesis.settings(
    deadline=None, derandomize=True, database=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.register_profile("small", UNTIMED, max_examples=25)
hypothesis.settings.register_profile("large", UNTIMED, max_examples=400, derandomize=False, print_blob=True)
hypothesis.settings.load_profile("small")

PROCESSES = range(2, 9)  # of -n auto; with more of them the longest file is what takes the time
BYTES_PER_PROCESS = 8 * 2**30  # a test of several hosts needs as much
DAYS = 3  # within which every slow test gets to run
NOT_REACHED = "not reached before the end of the time for slow tests"
# The longest first, so that no process is left with a long file when the other has nothing more to do. The first two
# begin together: one of them waits for the quickstart's rehearsal, the other does not need it.
LONGEST_FIRST = (
    "tests/e2e/test_whole_loop.py",
    "tests/verl/rollout/test_rollout_manager.py",
    "tests/e2e/test_several_nodes.py",
    "tests/e2e/test_train_scripts.py",
    "tests/e2e/test_new_users_hour.py",
    "tests/test_documented_commands.py",
    "tests/verl/trainer/test_dry_run.py",
    "tests/verl/single_controller/test_nodes.py",
    "tests/search_r1/viewer/test_viewer_page.py",
    "tests/test_scripts.py",
    "tests/search_r1/llm_agent/test_serve_engine.py",
    "tests/verl/single_controller/test_placement.py",
    "tests/verl/engine/test_engine_two_workers.py",
    "tests/verl/trainer/test_plan.py",
    "tests/verl/rollout/test_stream.py",
    "tests/verl/rollout/test_rollout_engine.py",
    "tests/search_r1/viewer/test_viewer_dashboard_page.py",
    "tests/verl/engine/test_lora.py",
    "tests/verl/rollout/test_weight_reload.py",
    "tests/test_experiments.py",
    "tests/verl/trainer/test_preflight_memory.py",
    "tests/verl/trainer/test_checkpoints.py",
    "tests/search_r1/search/test_search_launch.py",
    "tests/e2e/test_bad_input.py",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("tiers")
    group.addoption("--day", type=int, help="begin with another third of the files each day (days since any date)")
    group.addoption("--until", type=float, metavar="TIME", help="begin no test after this time (seconds since 1970)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Whole files in another order: the tests of a file share what its fixtures start."""
    files = [list(tests) for _, tests in groupby(items, key=file_of)]
    files.sort(key=lambda tests: _rank(file_of(tests[0])))
    if (day := config.getoption("day")) is not None:
        begin = day % DAYS * len(files) // DAYS
        files = files[begin:] + files[:begin]
    items[:] = [item for tests in files for item in tests]


def _rank(file: str) -> int:
    return LONGEST_FIRST.index(file) if file in LONGEST_FIRST else len(LONGEST_FIRST)


def file_of(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


def pytest_runtest_setup(item: pytest.Item) -> None:
    until = item.config.getoption("until")
    if until is not None and time.time() > until:
        pytest.skip(NOT_REACHED)


@cache
def _has_hosts(file: Path) -> bool:
    """They are up one network at a time on a machine (`LOCK` in hosts.py)."""
    return "\nfrom hosts import " in file.read_text()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One process a core, as far as the memory goes. Two also on one core: a test spends half its time waiting."""
    wanted = min(usable_cores(), usable_memory() // BYTES_PER_PROCESS)
    return min(max(wanted, PROCESSES[0]), PROCESSES[-1])


class HostsInOne(LoadFileScheduling):
    """The tests of a file in one process, and in one process all files with hosts: two would wait for each other."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return "files with hosts" if _has_hosts(self.config.rootpath / file) else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> HostsInOne | None:
    """None: xdist's own."""
    return HostsInOne(config, log) if config.getoption("dist") == "loadfile" else None


class LeftOut:
    """Counts the slow tests that the options leave out, in whichever process collects."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self.slow = 0

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        self.slow += sum(item.get_closest_marker("slow") is not None for item in items)

    def pytest_sessionfinish(self) -> None:
        if hasattr(self._config, "workeroutput"):
            self._config.workeroutput["left_out_slow"] = self.slow

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self.slow = getattr(node, "workeroutput", {}).get("left_out_slow", self.slow)  # each process collects all

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        skipped = terminalreporter.stats.get("skipped", ())
        reasons = Counter(report.longrepr[2].removeprefix("Skipped: ").splitlines()[0] for report in skipped)
        if unreached := [report.nodeid for report in skipped if report.longrepr[2].endswith(NOT_REACHED)]:
            terminalreporter.section(NOT_REACHED)
            terminalreporter.write_line("\n".join(unreached))
        left_out = [f"{self.slow} slow tests (bash scripts/test.sh --all)"] if self.slow else []
        left_out += [f"{number}: {reason}" for reason, number in reasons.most_common()]
        if left_out:
            terminalreporter.write_line(f"did not run: {'; '.join(left_out)}")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(LeftOut(config))
