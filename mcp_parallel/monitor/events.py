"""TensorBoard events of a run: one event a step with all of its points, by TensorBoard's writer.

``SummaryWriter.add_scalar`` makes an event of each point. Events of a step take a third of the time
together, and most of that is their checksum, on a thread of TensorBoard's. No torch.
"""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

# Points wait so long for others before they are handed to the system.
FLUSH_S = 5


def open_events(folder: Path, first_step: int) -> EventWriter | None:
    """A writer, or None where TensorBoard is not installed: said on stderr.

    Args:
        folder: where the file goes; made when it is not there.
        first_step: what other files of the folder say of this step and later ones is void.
    """
    if importlib.util.find_spec("tensorboard") is None:
        sys.stderr.write(
            "no TensorBoard events: tensorboard is not installed (pip install tensorboard); "
            "metrics.jsonl has the same numbers\n"
        )
        return None
    return EventWriter(folder, first_step)


class EventWriter:
    """Appends to an event file of its own.

    What was added is on disk ``FLUSH_S`` seconds and a step later, a text at once.

    Args:
        folder: where the file goes; made when it is not there.
        first_step: what other files of the folder say of this step and later ones is void.
    """

    def __init__(self, folder: Path, first_step: int) -> None:
        # Takes a second or more to import, so neither before it is needed nor on other ranks.
        from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, types_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        # protobuf makes these modules' names as they are imported: no type checker knows them.
        self._events: Any = event_pb2
        self._summaries: Any = summary_pb2
        self._tensors: Any = tensor_pb2
        self._types: Any = types_pb2
        self._file: Any = EventFileWriter(str(folder), flush_secs=FLUSH_S)
        session = self._events.SessionLog
        self._add(first_step, session_log=session(status=session.START))
        self._file.flush()

    def scalars(self, step: int, values: Iterable[tuple[str, float]]) -> None:
        """Points of curves.

        Args:
            step: of all of them.
            values: tag and number of each; beyond float32 it is infinite.
        """
        summary = self._summaries.Summary
        points = [summary.Value(tag=tag, simple_value=number) for tag, number in values]
        self._add(step, summary=summary(value=points))

    def text(self, step: int, tag: str, text: str) -> None:
        """A text, as the Text tab shows it; on disk at once."""
        summary, metadata = self._summaries.Summary, self._summaries.SummaryMetadata
        tensor = self._tensors.TensorProto(dtype=self._types.DT_STRING, string_val=[text.encode()])
        tensor.tensor_shape.dim.add(size=1)
        value = summary.Value(
            tag=f"{tag}/text_summary",
            metadata=metadata(plugin_data=metadata.PluginData(plugin_name="text")),
            tensor=tensor,
        )
        self._add(step, summary=summary(value=[value]))
        self._file.flush()

    def close(self) -> None:
        """Write what is left."""
        self._file.close()

    def _add(self, step: int, **what: Any) -> None:
        self._file.add_event(self._events.Event(wall_time=time.time(), step=step, **what))
