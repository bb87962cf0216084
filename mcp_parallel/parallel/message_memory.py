"""Memory of the messages between pipeline stages, held while they are under way and no longer.

torch's stages allocate a buffer for each micro-batch and direction before the first step, and its
runtime keeps what was sent until a step ends: four messages a micro-batch, where a schedule such as
1F1B promises memory that does not grow with their number.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import P2POp

from mcp_parallel.schedules.messages import Message


class Outbox:
    """What a rank has sent and the other side may not have taken yet.

    Args:
        proofs: the sends that are known to be over once a message has come
            (``proofs_of_delivery``). They follow from order alone, so they hold on a GPU too,
            where a message that "has come" is one that the stream waits for: whatever reuses the
            memory is queued behind the other side's read.
    """

    def __init__(self, proofs: Mapping[Message, Sequence[Message]]) -> None:
        self._proofs = proofs
        self._sent: dict[Message, list[Tensor]] = {}

    def put(self, message: Message, ops: Iterable[P2POp]) -> None:
        """Note what the runtime is about to send."""
        self._sent[message] = [op.tensor for op in ops]

    def has_come(self, message: Message) -> None:
        """Free what the arrival of ``message`` proves delivered."""
        for sent in self._proofs.get(message, ()):
            for tensor in self._sent.pop(sent, ()):
                # The runtime's requests hold this very tensor: its memory is what can go.
                tensor.data = tensor.new_empty(0)

    def clear(self) -> None:
        """Forget the sends of a step that has ended: the runtime has waited for them."""
        self._sent.clear()


def fill(slots: Iterable[Any], device: torch.device) -> None:
    """Give each of a stage's receive slots its memory.

    Args:
        slots: torch's ``_RecvInfo``, of one micro-batch and direction.
        device: where to.
    """
    for slot in slots:
        if slot.buffer is not None and slot.buffer.is_meta:
            slot.buffer = torch.empty_like(slot.buffer, device=device)


def empty(slots: Iterable[Any]) -> None:
    """Take the memory of receive slots away; their shapes stay."""
    for slot in slots:
        if slot.buffer is not None:
            slot.buffer = torch.empty_like(slot.buffer, device="meta")
