"""A process group that notes what passes through it."""

from __future__ import annotations


class Recorder:
    """A process group that notes the collectives it passes on and the bytes that leave the rank.

    (A TorchDispatchMode would do too, but its first use imports the compiler: seconds a rank.)
    """

    def __init__(self, group):
        self.group = group
        self.calls = []

    def __getattr__(self, name):
        return getattr(self.group, name)

    def alltoall_base(self, received, rows, *args):
        self.calls.append(("all_to_all", rows.nbytes - rows[0].nbytes))
        return self.group.alltoall_base(received, rows, *args)

    def _allgather_base(self, parts, x, *args):
        self.calls.append(("all_gather", x.nbytes * (self.group.size() - 1)))
        return self.group._allgather_base(parts, x, *args)
