"""How many bytes a tensor takes while it waits for the backward pass. No torch.

Mirrors ``model/packing.py`` and ``model/formats.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

from mcp_parallel.config import MemoryConfig

# As in model/packing.py and model/formats.py; a test holds them together.
SMALLEST = 1024
BLOCK_SIZE = 256


@dataclass(frozen=True)
class Keeping:
    """What the blocks of a run do with what autograd saves."""

    policy: str
    compression: str

    @classmethod
    def of(cls, memory: MemoryConfig) -> Keeping:
        """That of a config."""
        return cls(memory.activation_checkpointing, memory.activation_compression)

    def packed_bytes(self, elements: int, bytes_each: int) -> int | None:
        """Bytes of the packed form; None where the tensor is kept as it is."""
        width = {"none": bytes_each, "bf16": 2, "int8": 1, "fp8": 1}[self.compression]
        if width >= bytes_each or elements < SMALLEST:
            return None
        scales = 0 if self.compression == "bf16" else 4 * -(-elements // BLOCK_SIZE)
        return width * elements + scales
