"""TensorBoard event files under `{run_dir}/tensorboard`."""

from __future__ import annotations

import io
import os
import socket
import time
from collections.abc import Mapping, Sequence

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.summary.writer.record_writer import RecordWriter

from verl.process.storage import append, writing
from verl.tracking.backend import RunInfo, Sample


class TensorboardBackend:
    """Writes one event per step with a scalar per metric, on disk at once, so that TensorBoard can follow the run.

    Does not use `SummaryWriter`, whose thread prints a traceback when the disk is full.
    """

    def __init__(self, run: RunInfo) -> None:
        folder = run.run_dir / "tensorboard"
        self._path = folder / f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._write(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        """A text `trajectories/train/N` for each sample: its facts and its full response."""
        # To TensorBoard, a text is a tensor of strings whose metadata names the plugin that shows it.
        values = [
            Summary.Value(
                tag=f"trajectories/train/{place}",
                metadata=SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text")),
                tensor=TensorProto(
                    dtype=DT_STRING,
                    tensor_shape=TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)]),
                    string_val=[_as_markdown(sample).encode("utf-8", "replace")],
                ),
            )
            for place, sample in enumerate(samples)
        ]
        self._write(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    def _write(self, event: Event) -> None:
        record = io.BytesIO()
        RecordWriter(record).write(event.SerializeToString())
        append(self._path, record.getvalue())

    def finish(self, failed: bool = False) -> None:
        """Does nothing: every event is already written."""


def _as_markdown(sample: Sample) -> str:
    """A sample as Markdown. Its texts are indented by four blanks, so that TensorBoard shows them as they stand."""
    parts = ", ".join(f"{name} {value:g}" for name, value in sample.components.items())
    reward = "none" if sample.reward is None else f"{sample.reward:g}"
    facts = f"**reward {reward}** {parts}; {sample.status}, {sample.searches} searches, {sample.data_source}"
    texts = (sample.question, f"gold: {sample.gold}", sample.response)
    return "\n\n".join([facts, *("\n".join(f"    {line}" for line in text.splitlines()) for text in texts)])
