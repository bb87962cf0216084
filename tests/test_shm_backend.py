"""The backend "shm" under torch.distributed: every call, on one host and on several."""

from __future__ import annotations

import os
import warnings
import weakref

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives  # defines the ops of _c10d_functional

pytest.importorskip("mcp_kernels._shm", reason="the _shm extension was not built")

from mcp_kernels.shm import ShmOptions, ShmProcessGroup

F32_EPS = 2.0**-24


def shm_group(world, **options):
    chosen = ShmOptions(**options) if options else None
    return dist.new_group(list(range(world)), backend="shm", pg_options=chosen)


def on_hosts(rank, world, hosts):
    """A group whose ranks claim to stand on hosts, such as "aab"."""
    return shm_group(world, host_id=hosts[rank])


# World and hosts: one host, two uneven ones, hosts with one rank each, and interleaved ranks.
PLACES = [(1, "a"), (2, "aa"), (3, "aaa"), (4, "aaaa"), (4, "aaab"), (2, "ab"), (4, "abab")]
places = pytest.mark.parametrize("world, hosts", PLACES, ids=[hosts for _, hosts in PLACES])


def numbers(rank, *shape, dtype=torch.float32):
    n = torch.tensor(shape).prod().item()
    return (torch.arange(n).reshape(shape) % 7 + 10 * rank).to(dtype)


def strided(x):
    """The same elements in memory that is not contiguous."""
    return torch.stack([x, torch.full_like(x, 99)], dim=-1)[..., 0]


def _calls(rank, world, hosts):
    group = on_hosts(rank, world, hosts)
    assert isinstance(group, ShmProcessGroup)
    assert (group.rank(), group.size(), group.name()) == (rank, world, "shm")
    assert group._get_backend(torch.device("cpu")).name() == "shm"
    assert dist.get_backend(group) == "shm"
    everyone = [numbers(peer, 3, 4) for peer in range(world)]
    mine = everyone[rank]

    for make in (torch.clone, strided):
        x = make(mine)
        dist.all_reduce(x, group=group)
        assert torch.equal(x, sum(everyone))
        x = make(mine)
        work = dist.all_reduce(x, dist.ReduceOp.AVG, group=group, async_op=True)
        assert work.get_future().wait()[0] is x
        torch.testing.assert_close(x, sum(everyone) / world, rtol=2 * F32_EPS, atol=0)
        x = make(mine)
        dist.reduce(x, 0, dist.ReduceOp.MAX, group=group)
        assert torch.equal(x, everyone[-1] if rank == 0 else mine)

        rows = [make(torch.zeros(3, 4)) for _ in range(world)]
        dist.all_gather(rows, make(mine), group=group)
        assert all(torch.equal(row, x) for row, x in zip(rows, everyone, strict=True))
        packed = make(torch.zeros(world * 3, 4))
        group._allgather_base(packed, make(mine)).wait()
        assert torch.equal(packed, torch.cat(everyone))

        whole = [numbers(peer, world, 5) for peer in range(world)]
        out = make(torch.zeros(5))
        group._reduce_scatter_base(out, make(whole[rank])).wait()
        assert torch.equal(out, sum(whole)[rank])
        out = make(torch.zeros(5))
        dist.reduce_scatter(out, [make(row) for row in whole[rank]], group=group)
        assert torch.equal(out, sum(whole)[rank])

        for root in range(world):
            x = make(mine)
            dist.broadcast(x, root, group=group)
            assert torch.equal(x, everyone[root])
            out = make(torch.zeros(3, 4))
            sources = [make(x) for x in everyone] if rank == root else None
            dist.scatter(out, sources, root, group=group)
            assert torch.equal(out, mine)
            rows = [make(torch.zeros(3, 4)) for _ in range(world)] if rank == root else None
            dist.gather(make(mine), rows, root, group=group)
            assert all(torch.equal(a, b) for a, b in zip(rows or [], everyone, strict=False))

        outs = [make(torch.zeros(peer + 1)) for peer in range(world)]
        ins = [make(numbers(rank, rank + 1)) for _ in range(world)]
        dist.all_to_all(outs, ins, group=group)
        assert all(torch.equal(out, numbers(p, p + 1)) for p, out in enumerate(outs))
    out = torch.zeros(world, 2)
    dist.all_to_all_single(out, numbers(rank, world, 2), group=group)
    assert torch.equal(out, torch.stack([numbers(p, world, 2)[rank] for p in range(world)]))

    objects = [None] * world
    dist.all_gather_object(objects, {"rank": rank, "text": "x" * 10_000}, group=group)
    assert [entry["rank"] for entry in objects] == list(range(world))
    dist.barrier(group=group)
    group.monitored_barrier()  # torch.distributed.monitored_barrier takes gloo alone
    dist.destroy_process_group(group)


@places
def test_calls(ranks, world, hosts):
    ranks.run(_calls, hosts, ranks=world)


def _dtypes(rank, world, hosts):
    group = on_hosts(rank, world, hosts)
    for dtype in (torch.bfloat16, torch.float16):
        parts = [
            torch.randn(999, generator=torch.Generator().manual_seed(p)).to(dtype)
            for p in range(world)
        ]
        x = parts[rank].clone()
        dist.all_reduce(x, group=group)
        exact = torch.stack(parts).double().sum(0)
        eps = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[dtype]
        wiggle = world * F32_EPS * torch.stack(parts).double().abs().sum(0)
        assert torch.all((x.double() - exact).abs() <= 1.01 * eps * exact.abs() + wiggle)
    for dtype in (torch.float64, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
        x = torch.full((70,), rank + 1).to(dtype)
        dist.all_reduce(x, group=group)
        assert torch.all(x == world * (world + 1) // 2)
        assert x.dtype == dtype
    x = torch.tensor([True, rank == 0, False])
    dist.all_reduce(x, group=group)
    assert x.tolist() == [True, True, False]
    x = torch.tensor([True, rank == 0, False])
    dist.all_reduce(x, dist.ReduceOp.MIN, group=group)
    assert x.tolist() == [True, world == 1, False]
    x = torch.full((5,), complex(rank, 1))
    dist.all_reduce(x, group=group)
    assert torch.all(x == complex(sum(range(world)), world))
    x = torch.tensor([-7, 7]) * (1 if rank else 2)
    total = 7 * (world + 1)
    dist.all_reduce(x, dist.ReduceOp.AVG, group=group)
    assert x.tolist() == [-(total // world), total // world], "cut towards zero"
    with pytest.raises(ValueError, match=r"op must be a reduction that torch.bool has .*, got AVG"):
        dist.all_reduce(torch.tensor([True]), dist.ReduceOp.AVG, group=group)
    with pytest.raises(ValueError, match=r"output must have .* elements of torch.float32, got 3"):
        group._allgather_base(torch.zeros(3), torch.zeros(2))
    empty = torch.zeros(0, 3)
    dist.all_reduce(empty, group=group)
    dist.broadcast(empty, 0, group=group)
    dist.barrier(group=group)


@places
def test_dtypes_and_refusals(ranks, world, hosts):
    ranks.run(_dtypes, hosts, ranks=world)


def _transfers(rank, world, hosts):
    group = on_hosts(rank, world, hosts)
    ahead, behind = (rank + 1) % world, (rank - 1) % world
    for n in (0, 5, 300_000):  # the last is more than a ring holds
        # Everyone sends first: a send that waits for its receiver would hang here.
        out, out2 = torch.full((n,), float(rank)), torch.full((n,), 100.0 + rank)
        here, here2 = torch.zeros(n), strided(torch.zeros(n))
        ops = [
            dist.P2POp(dist.isend, out, ahead, group),
            dist.P2POp(dist.isend, out2, ahead, group),
            dist.P2POp(dist.irecv, here, behind, group),
            dist.P2POp(dist.irecv, here2, behind, group),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        assert torch.all(here == behind)
        assert torch.all(here2 == 100.0 + behind)
    # Tags: the second message is received first.
    first, second = torch.zeros(3), torch.zeros(3)
    sent = [dist.isend(torch.full((3,), float(t)), ahead, group, tag=t) for t in (1, 2)]
    dist.recv(second, behind, group, tag=2)
    dist.recv(first, behind, group, tag=1)
    assert (first[0], second[0]) == (1, 2)
    for work in sent:
        work.wait()
    # A collective while a receive is open, then the message it waits for.
    late = torch.zeros(200_000)
    work = dist.irecv(late, behind, group)
    x = torch.ones(10)
    dist.all_reduce(x, group=group)
    assert x[0] == world
    dist.send(torch.full((200_000,), 3.0 + rank), ahead, group)
    work.wait()
    assert torch.all(late == 3.0 + behind)
    if rank == 0:
        seen = set()
        for _ in range(world - 1):
            x = torch.zeros(4)
            source = dist.recv(x, group=group)
            assert torch.all(x == source)
            seen.add(source)
        assert seen == set(range(1, world))
    else:
        dist.send(torch.full((4,), float(rank)), 0, group)
    dist.barrier(group=group)


@pytest.mark.parametrize("world, hosts", [(2, "aa"), (3, "aaa"), (4, "aaaa"), (4, "aaab")])
def test_transfers(ranks, world, hosts):
    ranks.run(_transfers, hosts, ranks=world)


def _receiver_computes(rank, world):
    """A big send completes while its receiver is busy: the receiver's own thread drains it."""
    group = shm_group(world)
    gloo = dist.group.WORLD
    n = 500_000
    if rank == 0:
        dist.send(torch.arange(float(n)), 1, group)  # returns before rank 1 waits for it
        dist.barrier(group=gloo)
        return True
    x = torch.zeros(n)
    work = dist.irecv(x, 0, group)
    dist.barrier(group=gloo)  # hangs unless the transfer moves meanwhile
    work.wait()
    return torch.equal(x, torch.arange(float(n)))


def test_transfers_move_while_the_rank_is_busy(ranks):
    assert ranks.run(_receiver_computes, ranks=2) == [True, True]


def _dropped_transfers(rank, world):
    """Whether tensors of transfers are gone: of one that was waited for, and of an open one."""
    group, gloo = shm_group(world), dist.group.WORLD
    if rank == 1:
        dist.barrier(group=gloo)
        dist.send(torch.ones(500_000), 0, group)
        dist.send(torch.ones(500_000), 0, group)
        return None
    x, y = torch.zeros(500_000), torch.zeros(500_000)
    first, second = dist.irecv(x, 1, group), dist.irecv(y, 1, group)
    places = weakref.ref(x), weakref.ref(y)
    dist.barrier(group=gloo)  # both were open for a while
    first.wait()
    del x, first, y
    are_gone = [place() is None for place in places]
    second.wait()
    return are_gone


def test_what_was_received_can_be_freed_at_once(ranks):
    assert ranks.run(_dropped_transfers, ranks=2) == [[True, False], None]


def _functional(rank, world):
    """What DTensor and compiled programs call: C++ that asks the group, then waits by tensor."""
    name = shm_group(world).group_name
    ops, wait = torch.ops._c10d_functional, torch.ops._c10d_functional.wait_tensor
    x = numbers(rank, 4, 3)
    total = sum(numbers(peer, 4, 3) for peer in range(world))
    assert torch.equal(wait(ops.all_reduce(x, "sum", name)), total)
    joined = wait(ops.all_gather_into_tensor(x, world, name))
    assert torch.equal(joined, torch.cat([numbers(peer, 4, 3) for peer in range(world)]))
    part = wait(ops.reduce_scatter_tensor(numbers(rank, 2 * world, 3), "sum", world, name))
    whole = sum(numbers(peer, 2 * world, 3) for peer in range(world))
    assert torch.equal(part, whole[2 * rank : 2 * rank + 2])
    sizes = [1] * world
    swapped = wait(ops.all_to_all_single(numbers(rank, world), sizes, sizes, name))
    assert torch.equal(swapped, torch.stack([numbers(p, world)[rank] for p in range(world)]))
    assert torch.equal(wait(ops.broadcast(x, 1, name)), numbers(1, 4, 3))


def test_functional_collectives(ranks):
    ranks.run(_functional, ranks=2)


def _fork(rank, world):
    group = shm_group(world)
    dist.all_reduce(torch.ones(1), group=group)
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        try:
            dist.all_reduce(torch.ones(1), group=group)
        except RuntimeError as error:
            os.write(write, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    x = torch.ones(1)
    dist.all_reduce(x, group=group)  # the child did no harm
    assert x.item() == world
    return os.read(read, 1000).decode()


def test_a_forked_child_is_told_what_to_do(ranks):
    for text in ranks.run(_fork, ranks=2):
        assert "belongs to the process that this one was forked from" in text
        assert "call init_process_group in the child" in text


def _two_level_reduce_scatter(rank, world, hosts):
    """Every reduction and carrier, without a reduction of the whole behind it."""
    group = on_hosts(rank, world, hosts)

    def refuse(*args):
        raise AssertionError("all_reduce must not be behind a reduce_scatter")

    group._comm.all_reduce = refuse
    Op = dist.ReduceOp
    combine = {
        Op.SUM: lambda x: x.sum(0),
        Op.AVG: lambda x: x.double().mean(0),
        Op.MAX: lambda x: x.amax(0),
        Op.MIN: lambda x: x.amin(0),
        Op.PRODUCT: lambda x: x.prod(0),
    }
    dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int16)
    for dtype in dtypes:
        for op, definition in combine.items():
            everyone = torch.stack(
                [(numbers(peer, world * 3, 5) % 3 + 1).to(dtype) for peer in range(world)]
            )
            out = torch.full((3, 5), 99, dtype=dtype)
            group._reduce_scatter_base(out, everyone[rank].clone(), op).wait()
            exact = definition(everyone.double())[3 * rank : 3 * rank + 3]
            if not dtype.is_floating_point:
                exact = exact.trunc()
            # Small integers: only an average is rounded at all, once.
            assert torch.equal(out, exact.to(torch.float32).to(dtype)), (dtype, op)
    x = torch.full((world, 2), 1.0 + rank, dtype=torch.complex64)
    out = torch.empty(2, dtype=torch.complex64)
    group._reduce_scatter_base(out, x.view(-1)).wait()
    assert out.tolist() == [world * (world + 1) / 2] * 2
    empty = torch.empty(0)
    group._reduce_scatter_base(empty, empty.clone()).wait()


@pytest.mark.parametrize("hosts", ["ab", "aab", "aaab", "abab", "abba", "abcd"])
def test_reduce_scatter_in_two_levels(ranks, hosts):
    ranks.run(_two_level_reduce_scatter, hosts, ranks=len(hosts))
