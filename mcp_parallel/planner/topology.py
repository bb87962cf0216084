"""Which links a group of ranks meets, given the order of ranks. No torch.

Ranks are numbered with tp fastest, then cp, dp, and pp slowest (``layout.Layout.coordinate``), and
each ``domain_ranks`` neighbours share the fast link. So tp groups are neighbours, and a group along
a slower axis has members that are further apart.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from mcp_parallel.planner.hardware import Hardware
from mcp_parallel.planner.layouts import PlannedLayout

Axis = Literal["tp", "cp", "dp_cp", "pp"]


class Group(NamedTuple):
    """Ranks that communicate."""

    ranks: int
    local: int
    """Of them in one domain."""

    @property
    def domains(self) -> int:
        """Domains that the group is spread over."""
        return -(-self.ranks // self.local)


def group_of(axis: Axis, layout: PlannedLayout, hardware: Hardware) -> Group:
    """A group along an axis; dp_cp holds the ranks with the same parameters."""
    sizes = {
        "tp": (layout.tp, 1),
        "cp": (layout.cp, layout.tp),
        "dp_cp": (layout.dp * layout.cp, layout.tp),
        "pp": (layout.pp, layout.tp * layout.cp * layout.dp),
    }
    ranks, stride = sizes[axis]
    return Group(ranks, members_in_domain(ranks, stride, hardware.domain_ranks))


def members_in_domain(ranks: int, stride: int, domain_ranks: int) -> int:
    """The fewest members of a group that a domain of its holds.

    Members are ``stride`` apart. Where the group or the stride does not fit domains evenly, some
    domains hold fewer members than others, and the slowest of them sets the pace.
    """
    span = ranks * stride
    if span <= domain_ranks:
        # Groups start at multiples of their span; one that crosses a border is split by it.
        if domain_ranks % span == 0:
            return ranks
        return max(1, ranks // 2)
    if stride >= domain_ranks:
        return 1
    return max(1, domain_ranks // stride)
