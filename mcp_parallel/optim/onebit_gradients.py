"""Gradient sums of a run with 1-bit Adam: all of them in stage 1, none over dp after it."""

from __future__ import annotations

from mcp_parallel.parallel.gradients import Gradients, bucket_shards, grad_of, sum_over_group
from mcp_parallel.parallel.mesh import DATA


class SwitchedGradients(Gradients):
    """``Gradients`` whose sums over dp end for good when the optimizer begins to compress.

    A tied embedding on two stages is not compressed: its gradient is still summed over dp, before
    the two copies exchange theirs.
    """

    sums_over_dp = True

    def stop_summing(self) -> None:
        """From now on gradients are each dp rank's own."""
        self.sums_over_dp = False
        if self.buckets is not None:
            self.buckets.release()
            self.buckets = bucket_shards(self.shards, None)

    def finish(self) -> None:
        """See ``Gradients.finish``."""
        data_group = self.mesh.group(DATA)
        if not self.sums_over_dp and self.tied and data_group is not None:
            sum_over_group([grad_of(shard) for shard in self.tied], data_group)
        super().finish()
