"""TensorBoard event files under `{run_dir}/tensorboard`."""

from __future__ import annotations

import io
import os
import socket
import time
from collections.abc import Mapping

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from verl.storage import append, writing
from verl.tracking.backend import Run


class TensorboardBackend:
    """One event a step, with a scalar per metric name; on the disk after every step, so that a viewer follows the run.

    Written here and not by `SummaryWriter`, whose thread prints a traceback when the disk is full.
    """

    def __init__(self, run: Run) -> None:
        folder = run.run_dir / "tensorboard"
        self._path = folder / f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._write(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    def _write(self, event: Event) -> None:
        record = io.BytesIO()
        RecordWriter(record).write(event.SerializeToString())
        append(self._path, record.getvalue())

    def finish(self) -> None:
        """Nothing is left to be written."""
