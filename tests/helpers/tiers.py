"""Which tests run, and in which order (a pytest plugin): CONTRIBUTING.md, "Tiers of tests", has the rules."""

from __future__ import annotations

import time
from collections import Counter
from itertools import groupby
from typing import Any

import pytest

DAYS = 3  # within which every slow test gets to run
NOT_REACHED = "not reached before the end of the time for slow tests"
# The longest first, so that no process is left with a long file when the other has nothing more to do.
LONGEST_FIRST: tuple[str, ...] = ()


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


class LeftOut:
    """Counts the slow tests that the options of this session leave out, in whichever process collects."""

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
        reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in skipped)
        if unreached := [report.nodeid for report in skipped if report.longrepr[2].endswith(NOT_REACHED)]:
            terminalreporter.section(NOT_REACHED)
            terminalreporter.write_line("\n".join(unreached))
        left_out = [f"{self.slow} slow tests (bash scripts/test.sh --all)"] if self.slow else []
        left_out += [f"{number}: {reason}" for reason, number in reasons.most_common()]
        if left_out:
            terminalreporter.write_line(f"did not run: {'; '.join(left_out)}")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(LeftOut(config))
