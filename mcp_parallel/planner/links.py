"""Time of a collective or a message, from bytes and a group's links. No torch.

An all-gather of B bytes brings each of n ranks B (n - 1) / n bytes, a reduce-scatter takes as much
from each, and an all-reduce is one after the other. Within a domain the fast link carries it. Over
d domains a ring crosses each border with as many network ports as the group has members there, so
B (d - 1) / d bytes go in over ``local`` ports, while the fast link carries what it did before:

    all_gather(B) = max(B (n - 1) / n / link, B (d - 1) / d / (local * network)) + latency * steps

Source: the bus bandwidth of NVIDIA's nccl-tests (doc/PERFORMANCE.md); Thakur et al. 2005.
"""

from __future__ import annotations

import math

from mcp_parallel.planner.hardware import Hardware
from mcp_parallel.planner.topology import Group

LINK_EFFICIENCY = 0.8
"""Part of a link's peak that large collectives reach: nccl-tests report 350 to 380 of NVLink's 450
GB/s on H100 nodes, and 40 to 45 of a port's 50."""


def all_gather_seconds(num_bytes: float, group: Group, hardware: Hardware) -> float:
    """An all-gather that leaves ``num_bytes`` on each rank; a reduce-scatter takes the same."""
    ranks, local = group
    if ranks == 1:
        return 0.0
    link = LINK_EFFICIENCY * hardware.domain_bytes_per_s
    seconds, latency = 0.0, 0.0
    if local > 1:
        seconds = num_bytes * (ranks - 1) / ranks / link
        latency = math.log2(local) * hardware.domain_latency_s
    domains = group.domains
    if domains > 1:
        network = LINK_EFFICIENCY * hardware.network_bytes_per_s * local
        seconds = max(seconds, num_bytes * (domains - 1) / domains / network)
        latency += math.log2(domains) * hardware.network_latency_s
    return seconds + latency


def all_reduce_seconds(num_bytes: float, group: Group, hardware: Hardware) -> float:
    """An all-reduce of ``num_bytes``."""
    return 2 * all_gather_seconds(num_bytes, group, hardware)


def message_seconds(num_bytes: float, group: Group, hardware: Hardware) -> float:
    """A message to the next rank of the group; the slowest of them."""
    if group.ranks == 1:
        return 0.0
    if group.domains > 1:
        rate, latency = hardware.network_bytes_per_s, hardware.network_latency_s
    else:
        rate, latency = hardware.domain_bytes_per_s, hardware.domain_latency_s
    return num_bytes / (LINK_EFFICIENCY * rate) + latency
