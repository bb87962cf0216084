"""Two levels of all-reduce: full precision inside a host, bits between hosts."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from recorder import Recorder

from mcp_kernels.ops._comm import split_sizes
from mcp_kernels.ops.compressed_all_reduce import ErrorState, compressed_all_reduce
from mcp_kernels.ops.host_groups import HostGroups
from mcp_kernels.testing import assert_same_bits, make_gradient


def inputs_of(rank, step, numel):
    return make_gradient(numel, seed=1000 * step + rank)


def hierarchical(rank, world, numel):
    """Two hosts of two ranks: 0 and 2 on one, 1 and 3 on the other."""
    group = HostGroups.discover(host_id=f"host{rank % 2}")
    state = ErrorState.zeros(numel, group)
    applied, arrived = torch.zeros(numel).double(), torch.zeros(numel).double()
    recorders = [Recorder(group.local), Recorder(group.across)]
    for step in range(20):
        applied += compressed_all_reduce(
            inputs_of(rank, step, numel), state, HostGroups(*recorders), block_size=64
        ).double()
    for step in range(20):
        arrived += torch.stack([inputs_of(r, step, numel).double() for r in range(world)]).mean(0)
    sizes = group.local_sizes(numel)
    start = sum(sizes[: group.local_rank])
    held = torch.zeros(numel, dtype=torch.float64)
    held[start : start + sizes[group.local_rank]] = state.worker_error.double() / 2
    server = split_sizes(sizes[group.local_rank], 2)
    at = start + sum(server[: dist.get_rank(group.across)])
    held[at : at + state.server_error.numel()] += state.server_error.double()
    dist.all_reduce(held)
    calls = [[name for name, _ in recorder.calls] for recorder in recorders]
    return applied, arrived, held, calls, (group.num_local, state.worker_error.numel())


@pytest.mark.parametrize("numel", (1, 1000, 4097))
def test_full_precision_inside_a_host_and_bits_between(ranks, numel):
    results = ranks.run(hierarchical, numel)
    for applied, arrived, held, (inside, between), (num_local, worker_numel) in results:
        assert_same_bits(applied, results[0][0])
        assert num_local == 2
        assert worker_numel <= -(-numel // 2)
        assert (applied + held - arrived).norm() < 1e-5 * arrived.norm()
        calls = ["all_to_all", "all_gather"] * 20
        assert between == (calls if worker_numel else [])
        assert inside == calls  # gloo's reduce-scatter is an exchange
        if numel > 1:
            assert (applied - arrived).norm() > 1e-3 * arrived.norm()  # bits did travel


def uneven_hosts(rank, world):
    HostGroups.discover(host_id=f"host{min(rank, 1)}")


def test_hosts_of_different_size_are_refused(ranks):
    with pytest.raises(AssertionError, match="must have the same number of ranks"):
        ranks.run(uneven_hosts, ranks=3)
