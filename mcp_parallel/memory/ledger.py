"""A count of bytes by what they are for, and of the most there ever were. No torch."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field


@dataclass(eq=False)
class Memory:
    """One allocation, or what stands for it while autograd keeps it in another form."""

    num_bytes: int
    part: str
    is_alive: bool = True
    holders: int = 1
    """Variables and graph nodes that keep it."""


@dataclass
class Ledger:
    """Replayed allocations of one rank."""

    total: int = 0
    peak: int = 0
    by_part: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    at_peak: dict[str, int] = field(default_factory=dict)
    """Bytes of each part at the peak."""

    def new(self, num_bytes: int, part: str = "activations") -> Memory:
        """Allocate; the caller is its one holder."""
        self.total += num_bytes
        self.by_part[part] += num_bytes
        if self.total > self.peak:
            self.peak = self.total
            self.at_peak = dict(self.by_part)
        return Memory(num_bytes, part)

    def hold(self, memory: Memory) -> Memory:
        """One more holder."""
        memory.holders += 1
        return memory

    def drop(self, *memories: Memory | None) -> None:
        """One holder less of each; the last one frees it."""
        for memory in memories:
            if memory is None:
                continue
            memory.holders -= 1
            assert memory.holders >= 0, "freed twice"
            if memory.holders == 0:
                self.total -= memory.num_bytes
                self.by_part[memory.part] -= memory.num_bytes

    def pass_by(self, num_bytes: int, part: str = "transients") -> None:
        """Allocate and free at once."""
        self.drop(self.new(num_bytes, part))
