"""A program tells what it is doing on standard error, and its libraries tell only what somebody can act on."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import threading

import pytest

from verl import startup

PROGRAM = """
from verl.startup import log_to_stderr, phase
log_to_stderr()
import logging, warnings
with phase("importing torch"):
    import torch
logging.getLogger("torch._library.triton").warning("noise")
logging.getLogger("httpx").info("noise")
logging.getLogger("vllm.triton_utils.importing").info("noise")
import bm25s
bm25s.logger.debug("noise")  # it made itself talkative
logging.getLogger("torch._dynamo").warning("of torch")
logging.getLogger("httpx").warning("of a request")
logging.getLogger("verl.trainer.recovery").warning("of ours")
warnings.warn("of a caller")
print("answer")
raise RuntimeError("at the end")
"""


def test_phases_and_what_can_be_acted_on_go_to_standard_error() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.stdout == "answer\n"
    assert re.search(r"^\d\d:\d\d:\d\d INFO verl.startup: \[ *\d+ s\] importing torch$", done.stderr, re.MULTILINE)
    assert "noise" not in done.stderr
    for told in ("of torch", "of a request", "of ours", "UserWarning: of a caller", "RuntimeError: at the end"):
        assert told in done.stderr, told


def test_a_long_phase_tells_that_it_is_still_going_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(startup, "BEAT_S", 0.01)
    seen = threading.Event()

    class Beats(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "so far" in record.getMessage():
                seen.set()

    handler = Beats()
    startup.log.addHandler(handler)
    try:
        with caplog.at_level(logging.INFO, "verl.startup"), startup.phase("loading a model"):
            assert seen.wait(60)
        told = len(caplog.records)
    finally:
        startup.log.removeHandler(handler)
    assert re.fullmatch(r"\[ *\d+ s\] loading a model", caplog.messages[0])
    assert all(re.fullmatch(r"\[ *\d+ s\] loading a model: \d+ s so far", text) for text in caplog.messages[1:])
    assert len(caplog.records) == told  # and no more once it is over


def test_what_the_user_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"VLLM_LOGGING_LEVEL": "DEBUG"})
    startup.quiet_libraries()
    assert os.environ == startup.ENGINE_VARIABLES | {"VLLM_LOGGING_LEVEL": "DEBUG"}
