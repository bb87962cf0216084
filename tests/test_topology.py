"""Hosts under a layout: which groups cross, how much they send, what is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from configs import applied, config_of

from mcp_parallel.check import check, find_problems
from mcp_parallel.cli.main import main
from mcp_parallel.errors import BAD_CONFIG, OK, ConfigError
from mcp_parallel.launch.variables import own_cuts
from mcp_parallel.layout import Layout
from mcp_parallel.presets import num_parameters
from mcp_parallel.rules.hosts import host_notes
from mcp_parallel.topology import crossings, cuts_around, cuts_between

REPOSITORY = Path(__file__).parent.parent
DP_APART, PP_APART = "dp-pp-cp-tp", "pp-dp-cp-tp"

# --- what crosses --------------------------------------------------------------------------------


def sent(per_host, **changes):
    config = config_of(**changes)
    return {c.axis: (c.hosts, c.num_bytes) for c in crossings(config, per_host)}


def test_gradients_round_a_ring_of_hosts():
    gradients = 4 * num_parameters(config_of().model)
    assert sent(1, parallel__dp=4) == {"dp_cp": (4, 2 * 3 * gradients // 4)}
    assert sent(2, parallel__dp=4) == {"dp_cp": (2, 2 * 3 * gradients // 4)}  # one edge out of each
    assert sent(4, parallel__dp=4) == {"dp_cp": (1, 0)}
    both = sent(2, parallel__dp=2, parallel__tp=2)  # two rings through each host, of half the size
    assert both == {"tp": (1, 0), "dp_cp": (2, 2 * 2 * (gradients // 2) // 2)}


def test_zero_and_one_bit_change_what_dp_sends():
    count = num_parameters(config_of().model)
    changes = {"parallel__dp": 2, "train__precision": "bf16", "train__micro_batch_size": 2}
    at = {zero: sent(1, parallel__zero=zero, **changes)["dp_cp"][1] for zero in range(4)}
    microbatches = 16 // (2 * 2)
    assert at[0] == 4 * count
    assert at[1] == at[2] == (4 + 2) * count // 2
    assert at[3] == (4 + 2 * 2 * microbatches) * count // 2
    onebit = sent(1, train__optimizer="onebit_adam", **changes)["dp_cp"][1]
    assert onebit == pytest.approx(count / 8 * (1 + 32 / 1024), abs=1)


@pytest.mark.parametrize("schedule, virtual, rounds", [("1f1b", 1, 1), ("interleaved", 2, 3)])
def test_a_pipeline_sends_each_boundary_both_ways(schedule, virtual, rounds):
    changes = {"parallel__pp": 2, "parallel__schedule": schedule}
    changes |= {"parallel__virtual_stages": virtual, "train__micro_batch_size": 4}
    boundary = 16 * 128 * 128 * 4  # samples, positions, width, float32
    # Rank 0 sends activations forward over 1 of 1 boundaries or 2 of 3, and gradients back over
    # the others; rank 1 likewise.
    busiest = 1 if rounds == 1 else 3
    assert sent(1, **changes) == {"pp": (2, busiest * boundary)}
    assert sent(2, **changes) == {"pp": (1, 0)}


def test_tensor_and_context_parallelism_send_for_each_layer():
    activations = 16 * 128 * 128 * 4
    assert sent(1, parallel__tp=2) == {"tp": (2, 8 * activations // 2 * 4)}
    # Keys and values of 4 of 8 heads, there and back with gradients of both.
    assert sent(1, parallel__cp=2)["cp"] == (2, 3 * 2 * activations // 2 // 2 * 4)


def test_the_order_of_ranks_decides_what_crosses():
    degrees = {"parallel__dp": 4, "parallel__pp": 2, "train__micro_batch_size": 2}
    replicas = sent(2, parallel__rank_order=DP_APART, **degrees)
    stages = sent(2, parallel__rank_order=PP_APART, **degrees)
    assert (replicas["pp"], stages["pp"][0]) == ((1, 0), 2)
    assert (replicas["dp_cp"][0], stages["dp_cp"][0]) == (4, 2)
    # A host holds both stages of a replica, or two replicas of one stage: half of the rings.
    assert replicas["dp_cp"][1] == 2 * stages["dp_cp"][1]


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize("order", (DP_APART, PP_APART))
def test_tensor_groups_are_refused_exactly_where_one_stands_on_two_hosts(order):
    for dp, tp, pp, per_host in product((1, 2, 3), (1, 2, 4), (1, 2), range(1, 9)):
        changes = {"parallel__dp": dp, "parallel__tp": tp, "parallel__pp": pp}
        config = config_of(train__global_batch_size=48, parallel__rank_order=order, **changes)
        layout = Layout.from_config(config.parallel)
        groups: dict[tuple[int, int], set[int]] = {}
        for rank in range(layout.world_size):
            place = layout.coordinate(rank)
            groups.setdefault((place.pp, place.dp), set()).add(rank // per_host)
        straddles = any(len(hosts) > 1 for hosts in groups.values())
        cuts = cuts_between(per_host, layout.world_size)
        names = [problem.name for problem in find_problems(config, cuts=cuts)]
        assert ("tp over hosts" in names) == straddles, (changes, per_host)


@pytest.mark.parametrize("per_host", (1, 2, 3, 6))
def test_each_way_out_keeps_tensor_groups_together(per_host):
    config = config_of(parallel__tp=4, parallel__dp=3, train__global_batch_size=48)
    cuts = cuts_between(per_host, 1 << 20)
    with pytest.raises(ConfigError) as refused:
        check(config, cuts=cuts)
    (problem,) = find_problems(config, cuts=cuts)
    assert str(problem).startswith("check: parallel.tp must keep each group of neighbouring ranks ")
    for way in problem.ways:
        left = find_problems(applied(config, way), cuts=cuts)
        assert "tp over hosts" not in [other.name for other in left]
    assert refused.value.layouts
    for change in refused.value.layouts:
        check(applied(config, change), 12, cuts)


def test_a_fast_link_over_hosts_moves_the_border():
    cuts = cuts_between(2, 1 << 20)
    config = config_of(parallel__tp=4, parallel__dp=2, parallel__link_domain=4)
    assert find_problems(config, cuts=cuts) == []
    narrow = config_of(parallel__tp=4, parallel__dp=2, parallel__link_domain=6)
    (problem,) = find_problems(narrow, cuts=cuts)
    assert "within link_domain = 6, got 4, which has ranks 4-7 on both sides of 6" in str(problem)


def test_what_is_slow_is_said_and_what_is_not_is_quiet():
    cuts = cuts_between(2, 1 << 20)
    (note,) = host_notes(config_of(parallel__cp=2, parallel__tp=2), cuts)
    assert note.startswith("cp = 2 x tp = 2 ")
    (note,) = host_notes(config_of(parallel__dp=4, parallel__zero=3), cuts)
    assert "gathers them twice" in note
    for quiet in (
        {"parallel__cp": 2},
        {"parallel__dp": 2, "parallel__zero": 3},
        {"parallel__dp": 4, "parallel__zero": 3, "parallel__dp_replicate": 2},
        {"parallel__dp": 4, "parallel__zero": 2},
    ):
        assert host_notes(config_of(**quiet), cuts) == []
    assert host_notes(config_of(parallel__dp=4, parallel__zero=3), ()) == []


def test_check_tells_what_crosses(capsys):
    flags = ["--dp", "2", "--tp", "2", "--ranks-per-host"]
    assert main(["check", *flags, "2", "--json"]) == OK
    result = json.loads(capsys.readouterr().out)
    assert result["ranks_per_host"] == 2
    assert [(link["axis"], link["hosts"]) for link in result["links"]] == [("tp", 1), ("dp_cp", 2)]
    assert main(["check", *flags, "2"]) == OK
    assert (
        "links   dp_cp: each group over 2 hosts, 3.1 MiB out of a host" in capsys.readouterr().out
    )
    assert main(["check", *flags, "1"]) == BAD_CONFIG
    assert "ranks 0-1 on both sides of 1" in capsys.readouterr().err
    assert main(["check", "--ranks-per-host", "0"]) == BAD_CONFIG
    assert "--ranks-per-host must be a number of ranks, got '0'" in capsys.readouterr().err


# --- under torchrun ------------------------------------------------------------------------------


def rank_of_torchrun(rank, local_rank, local_world, world):
    names = {"RANK": rank, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": local_world}
    names |= {"WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    return {name: str(value) for name, value in names.items()} | {"TORCHELASTIC_RUN_ID": "x"}


def test_a_rank_knows_where_its_host_ends():
    assert own_cuts(rank_of_torchrun(5, 1, 4, 12)) == [4, 8]
    assert own_cuts(rank_of_torchrun(1, 1, 4, 12)) == [4]
    assert own_cuts(rank_of_torchrun(11, 3, 4, 12)) == [8]
    assert own_cuts(rank_of_torchrun(1, 1, 2, 2)) == []
    assert own_cuts({"RANK": "1", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}) == []
    assert cuts_around(0, 3, 12) == [3]  # hosts may differ in size


def test_a_straddling_layout_is_refused_on_the_host_that_it_straddles_before_torch_is_imported():
    code = (
        "import sys; from mcp_parallel.cli.main import main; "
        "code = main(['train', '--tp', '2']); assert 'torch' not in sys.modules; sys.exit(code)"
    )
    # The second of two hosts, of 3 and 3 ranks: its first rank speaks, though it is not rank 0.
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY), **rank_of_torchrun(3, 0, 3, 6)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == BAD_CONFIG, done.stderr
    assert "parallel.tp must keep each group of neighbouring ranks on one host" in done.stderr
    assert "nearest layouts that run" in done.stderr


# --- process groups on hosts ---------------------------------------------------------------------


def groups_on_hosts(rank, world, hosts, layout):
    """``{axis: (hosts of this rank's group, sum over it of 10^rank)}`` on simulated hosts."""
    from mcp_kernels.shm import ShmOptions
    from mcp_parallel.parallel.mesh import build_mesh

    options = ShmOptions(host_id=hosts[rank])
    usual, everyone = dist.group.WORLD, list(range(world))
    dist.distributed_c10d._update_default_pg(
        dist.new_group(everyone, backend="shm", pg_options=options)
    )
    try:
        mesh = build_mesh(layout, torch.device("cpu"))
        assert mesh is not None
        assert mesh.device_mesh is not None
        groups = {axis: mesh.group(axis) for axis in ("pp", "cp", "tp", "dp_cp")}
        if layout.is_hybrid:
            groups |= {axis: mesh.device_mesh.get_group(axis) for axis in mesh.zero_axes}
        found = {}
        for axis, group in groups.items():
            if group is not None:
                total = torch.tensor([10.0**rank])
                dist.all_reduce(total, group=group)
                found[axis] = [len(members) for members in group.place.hosts], int(total)
        return found
    finally:
        dist.distributed_c10d._update_default_pg(usual)


def test_groups_stand_on_the_hosts_that_the_order_puts_them_on(ranks):
    pytest.importorskip("mcp_kernels._shm", reason="the _shm extension was not built")
    first = ranks.run(groups_on_hosts, "aabb", Layout(dp=2, pp=2))[0]
    assert first == {"pp": ([2], 11), "dp_cp": ([1, 1], 101)}
    first = ranks.run(groups_on_hosts, "aabb", Layout(dp=2, pp=2, rank_order=PP_APART))[0]
    assert first == {"pp": ([1, 1], 101), "dp_cp": ([2], 11)}
    # HSDP's shards stay on a host; the whole dp group is reduced there, then between the hosts.
    hybrid = Layout(dp=4, zero=3, dp_replicate=2)
    for rank, found in enumerate(ranks.run(groups_on_hosts, "aabb", hybrid)):
        shard, replica = (11, 1100)[rank // 2], (101, 1010)[rank % 2]
        assert found == {
            "dp_cp": ([2, 2], 1111),
            "dp_shard_cp": ([2], shard),
            "dp_replicate": ([1, 1], replica),
        }
