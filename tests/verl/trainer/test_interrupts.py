"""A run ends by SIGTERM and Ctrl-C even if the signal comes at a moment at which Python drops exceptions."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import signal
import sys
import threading
import weakref
from verl.trainer.exit_status import exit_status
from verl.trainer.interrupts import heed_interrupts

number, drops_in = getattr(signal, sys.argv[1]), sys.argv[2]
signal.signal(signal.SIGINT, signal.default_int_handler)

def interrupt(*_):
    signal.raise_signal(number)

class Object:
    if drops_in == "finalizer":
        __del__ = interrupt

def train():
    heed_interrupts()
    some = Object()
    watch = weakref.ref(some, interrupt) if drops_in == "weakref callback" else None
    if drops_in == "nothing":
        interrupt()
    del some
    print("dropped", flush=True)
    threading.Event().wait(60)

sys.exit(exit_status(train, "as asked"))
"""


@pytest.mark.parametrize("number", ["SIGTERM", "SIGINT"])
@pytest.mark.parametrize("drops_in", ["finalizer", "weakref callback", "nothing"])
def test_an_interrupt_is_heeded(number: str, drops_in: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, number, drops_in], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (130, "interrupted: as asked\n")
    assert done.stdout == ("" if drops_in == "nothing" else "dropped\n")


def test_what_else_is_dropped_is_printed_as_ever() -> None:
    program = """
from verl.trainer.interrupts import heed_interrupts

class Broken:
    def __del__(self):
        raise ValueError("of a finalizer")

heed_interrupts()
Broken()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert "Exception ignored" in done.stderr and "ValueError: of a finalizer" in done.stderr
