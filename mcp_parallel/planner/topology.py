"""Which links a group of ranks meets, given the order of ranks. No torch.

Each ``domain_ranks`` neighbours share the fast link, and ranks are numbered with tp fastest, then
cp, then pp and dp in the order that the layout says (``layout.Layout.coordinate``). So tp groups
are neighbours, and a group along a slower axis has members that are further apart.
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
    domain, inner = hardware.domain_ranks, layout.tp * layout.cp
    if axis == "tp":
        return Group(layout.tp, members_in_domain(layout.tp, 1, domain))
    if axis == "cp":
        return Group(layout.cp, members_in_domain(layout.cp, layout.tp, domain))
    is_dp_outermost = layout.rank_order == "dp-pp-cp-tp"
    if axis == "pp":
        stride = inner if is_dp_outermost else inner * layout.dp
        return Group(layout.pp, members_in_domain(layout.pp, stride, domain))
    ranks = layout.dp * layout.cp
    if not is_dp_outermost or layout.pp == 1:  # cp and dp make one regular run
        return Group(ranks, members_in_domain(ranks, layout.tp, domain))
    beside = members_in_domain(layout.dp, inner * layout.pp, domain)
    return Group(ranks, beside * members_in_domain(layout.cp, layout.tp, domain))


def members_in_domain(ranks: int, stride: int, domain_ranks: int) -> int:
    """The fewest members of a group that a domain of its holds.

    Members are ``stride`` apart. Where the group or the stride does not fit domains evenly, some
    domains hold fewer members than others, and the slowest of them sets the pace.
    """
    span = ranks * stride
    count = min(ranks, max(1, domain_ranks // stride))
    # Groups start at multiples of their span. Where it and the domain are no multiples of each
    # other, a border cuts some group: half of it may be on either side.
    is_regular = domain_ranks % stride == 0 and (
        domain_ranks % span == 0 or span % domain_ranks == 0
    )
    return count if is_regular or stride >= domain_ranks else max(1, count // 2)
