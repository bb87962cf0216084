"""DDP and FSDP2 hooks: nothing is lost, not when buckets change either, and ranks stay equal."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from mcp_kernels.ops._code_exchange import uncompressed_bytes, wire_bytes
from mcp_kernels.ops._codecs import CODECS
from mcp_kernels.ops._comm import split_sizes
from mcp_kernels.ops.block_layout import BlockLayout
from mcp_kernels.optim.ddp_hooks import compress_ddp, reshard_hook_states
from mcp_kernels.optim.fsdp_hooks import compress_reduce_scatter, compress_replicas
from mcp_kernels.testing import assert_same_bits, make_gradient

SHAPES = {"a": (40, 30), "b": (7,), "c": (65, 3), "d": (1000,)}
BLOCK = 64
KB = 1 / 1024  # of bucket_cap_mb: several buckets


class Bare(torch.nn.Module):
    """Parameters whose gradients are what ``backward_of`` says.

    They are used in an order that is not the one of registration, so that DDP, which lays buckets
    out by arrival after the first backward, has something to change.
    """

    def __init__(self):
        super().__init__()
        for name, shape in SHAPES.items():
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(shape)))

    def forward(self, grads):
        total = torch.zeros(())
        for name in ("c", "a", "d", "b"):
            total = total + (getattr(self, name) * grads[name]).sum()
        return total


def gradients(rank, step):
    return {
        name: (
            make_gradient(torch.Size(shape).numel(), seed=i)
            + make_gradient(torch.Size(shape).numel(), seed=1000 * step + 10 * rank + i)
        ).view(shape)
        for i, (name, shape) in enumerate(SHAPES.items(), start=1)
    }


def backward(ddp, rank, step):
    ddp.zero_grad()
    ddp(gradients(rank, step)).backward()
    return {name: p.grad.clone() for name, p in ddp.module.named_parameters()}


def held_by(states):
    """By parameter: mean worker error + server error, float64, from the states of all ranks."""
    held = {}
    for index, bucket in enumerate(states[0]["buckets"]):
        olds = [state["buckets"][index] for state in states]
        flat = torch.stack([old["worker_error"].double() for old in olds]).mean(0)
        server = torch.cat([old["server_error"].double() for old in olds])
        flat[: server.numel()] += server
        layout = BlockLayout(bucket["sizes"], BLOCK, len(states))
        for name, at, size in zip(bucket["names"], layout.offsets, layout.sizes, strict=True):
            held[name] = flat[at : at + size]
    return held


def run_hook(rank, world, codec, steps, cap_mb, start_step):
    ddp = DistributedDataParallel(Bare(), bucket_cap_mb=cap_mb)
    state = compress_ddp(ddp, codec, block_size=BLOCK, start_step=start_step)
    history = [backward(ddp, rank, step) for step in range(steps)]
    layout = [bucket["names"] for bucket in state.state_dict()["buckets"]]
    return history, state.state_dict(), layout, (state.bytes_sent, state.uncompressed_bytes)


@pytest.mark.parametrize(
    "world, codec",
    [
        (2, "onebit"),
        (3, "int8"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((2, "int8"), (2, "int4"), (3, "onebit"), (3, "int4"))
        ),
    ],
)
def test_all_gradients_arrive_in_the_end(ranks, codec, world):
    """Over 10 passes, with buckets laid out anew after the first."""
    steps = 10
    results = ranks.run(run_hook, codec, steps, 2 * KB, 0, ranks=world)
    held = held_by([state for _, state, _, _ in results])
    for name in SHAPES:
        applied = sum(history[name].double() for history in results[0][0])
        came_in = sum(
            gradients(rank, step)[name].double() / world
            for rank in range(world)
            for step in range(steps)
        )
        left = held[name].view(applied.shape)
        assert (applied + left - came_in).norm() <= 1e-6 * came_in.norm()
        assert (applied - came_in).norm() > 1e-5 * came_in.norm()  # the errors do hold something
    for history, _, layout, _ in results:
        assert len(layout) > 1
        for step in range(steps):
            for name, grad in history[step].items():
                assert_same_bits(grad, results[0][0][step][name], "replica")


def test_buckets_do_change(ranks):
    """What the test above relies on."""
    first = ranks.run(run_hook, "int8", 1, 2 * KB, 0, ranks=2)[0][2]
    later = ranks.run(run_hook, "int8", 3, 2 * KB, 0, ranks=2)[0][2]
    assert first != later
    assert {name for names in first for name in names} == set(SHAPES)


def test_compression_starts_when_it_is_told(ranks):
    for history, state, _, _ in ranks.run(run_hook, "onebit", 3, 1, 2, ranks=2):
        for step in range(2):
            for name, grad in history[step].items():
                wanted = (gradients(0, step)[name] + gradients(1, step)[name]) / 2
                torch.testing.assert_close(grad, wanted, rtol=2.0**-23, atol=0)
        assert state["steps"] == 3
        assert any(bucket["worker_error"].any() for bucket in state["buckets"])


def test_bytes_are_counted(ranks):
    sizes = [torch.Size(shape).numel() for shape in SHAPES.values()]
    padded = BlockLayout(sizes, BLOCK, 2).padded_numel
    for _, _, layout, (sent, plain) in ranks.run(run_hook, "int4", 2, 1, 0, ranks=2):
        assert len(layout) == 1
        assert sent == wire_bytes(padded, 2, CODECS["int4"], BLOCK)
        assert plain == uncompressed_bytes(sum(sizes), 2)


# --- checkpoints --------------------------------------------------------------------------------


def resume_hook(rank, world, states, cap_mb):
    ddp = DistributedDataParallel(Bare(), bucket_cap_mb=cap_mb)
    state = compress_ddp(ddp, "onebit", block_size=BLOCK)
    state.load_state_dict(states[rank])
    history = [backward(ddp, rank, step) for step in range(4, 8)]
    return history, state.state_dict()


@pytest.mark.parametrize("cap_mb", (1, 2 * KB))
def test_resume_is_bit_exact(ranks, cap_mb):
    """Though the first pass of the new DDP has other buckets than the run that goes on."""
    whole = ranks.run(run_hook, "onebit", 8, cap_mb, 0, ranks=3)
    states = [state for _, state, _, _ in ranks.run(run_hook, "onebit", 4, cap_mb, 0, ranks=3)]
    resumed = ranks.run(resume_hook, states, cap_mb, ranks=3)
    for (history, _), (wanted, _, _, _) in zip(resumed, whole, strict=True):
        for step in range(4):
            for name in SHAPES:
                assert_same_bits(history[step][name], wanted[4 + step][name])


@pytest.mark.parametrize(
    "world, cap_mb",
    [
        (4, 2 * KB),
        (1, 1),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((2, 2 * KB), (3, 1))),
    ],
)
def test_errors_move_to_other_buckets_and_ranks(ranks, world, cap_mb):
    states = [state for _, state, _, _ in ranks.run(run_hook, "onebit", 4, 1, 0, ranks=2)]
    moved = [reshard_hook_states(states, world, rank) for rank in range(world)]
    before, at_start = held_by(states), held_by(moved)
    for name in SHAPES:
        torch.testing.assert_close(at_start[name], before[name], rtol=0, atol=1e-6)
    if world == 1:
        return  # a single rank sends nothing
    results = ranks.run(resume_hook, moved, cap_mb, ranks=world)
    after = held_by([state for _, state in results])
    for name in SHAPES:
        applied = sum(history[name].double() for history in results[0][0]).view(-1)
        came_in = sum(
            gradients(rank, step)[name].double().view(-1) / world
            for rank in range(world)
            for step in range(4, 8)
        )
        fault = (applied + after[name] - before[name] - came_in).norm()
        assert fault <= 1e-6 * came_in.norm()


REFUSED_STATE = (
    "CompressionState.load_state_dict: world_size must be 1, got 2; "
    "use reshard_hook_states for another number of ranks"
)


def refusals(rank, world, foreign):
    ddp = DistributedDataParallel(Bare())
    calls = [
        lambda: compress_ddp(ddp, "int2"),
        lambda: compress_ddp(ddp, start_step=-1),
        lambda: compress_ddp(ddp, block_size=4),
        lambda: compress_ddp(ddp).load_state_dict(foreign),
    ]
    messages = []
    for call in calls:
        with pytest.raises(ValueError) as refused:  # noqa: PT011 (the text is what is returned)
            call()
        messages.append(str(refused.value))
    return messages


def test_messages(ranks):
    states = [state for _, state, _, _ in ranks.run(run_hook, "int8", 1, 1, 0, ranks=2)]
    with pytest.raises(ValueError, match="states must be of all ranks in order, got"):
        reshard_hook_states(states[1:], 1, 0)
    with pytest.raises(ValueError, match=r"rank must be in \[0, 1\], got 2"):
        reshard_hook_states(states, 2, 2)
    assert ranks.run(refusals, states[1], ranks=1) == [
        [
            "compress_ddp: codec must be one of onebit, int8, int4, got 'int2'",
            "CompressionState: start_step must be >= 0, got -1",
            "CompressionState: block_size must be a positive multiple of 8, got 4",
            REFUSED_STATE,
        ]
    ]
    for compress in (compress_reduce_scatter, lambda model: compress_replicas(model, None)):
        with pytest.raises(ValueError, match="model must be sharded, got none"):
            compress(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="codec must be int8, int4 or fp8, got 'onebit'"):
        compress_reduce_scatter(torch.nn.Linear(2, 2), "onebit")


# --- FSDP2 --------------------------------------------------------------------------------------


class Block(torch.nn.Module):
    """Nested, so that two modules are sharded."""

    def __init__(self):
        super().__init__()
        self.inner = Bare()
        self.last = torch.nn.Parameter(torch.zeros(64))

    def forward(self, grads):
        return self.inner(grads) + (self.last * grads["d"][:64]).sum()


def full_grads(model):
    return {name: p.grad.full_tensor().clone() for name, p in model.named_parameters()}


def sharded(mesh):
    model = Block()
    fully_shard(model.inner, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def reduce_scatter(rank, world, codec, error_feedback, steps):
    model = sharded(init_device_mesh("cpu", (world,)))
    handle = compress_reduce_scatter(model, codec, block_size=BLOCK, error_feedback=error_feedback)
    history = []
    for step in range(steps):
        model.zero_grad()
        model(gradients(rank, step)).backward()
        history.append(full_grads(model))
    return history, handle.state_dict()


@pytest.mark.parametrize("codec, levels", [("int8", 127), ("int4", 7)])
def test_compressed_reduce_scatter(ranks, codec, levels):
    """With feedback the sum of many steps is as good as one; without it errors pile up."""
    world, steps = 3, 12
    faults = {}
    for error_feedback in (True, False):
        results = ranks.run(reduce_scatter, codec, error_feedback, steps, ranks=world)
        history, state = results[0]
        assert bool(state["inner"]) == error_feedback
        applied = sum(grads["inner.d"].double() for grads in history)
        every = [gradients(r, s)["d"].double() for s in range(steps) for r in range(world)]
        came_in = torch.stack(every).sum(0) / world
        faults[error_feedback] = (applied - came_in).norm().item()
        # Half a level of the largest value is the most that one coding can lose.
        largest = max(grad.abs().max() for grad in every)
        assert (history[0]["inner.d"] - sum(every[:world]) / world).abs().max() <= (
            0.5 / levels * largest * 1.001
        )
    assert faults[True] < 0.6 * faults[False]


def replicas(rank, world, codec, steps):
    """Shards over {0, 1} and {2, 3}, replicas {0, 2} and {1, 3}."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    model = sharded(mesh["shard"])
    handle = compress_replicas(model, mesh.get_group("replica"), codec, block_size=BLOCK)
    history = []
    for step in range(steps):
        model.zero_grad()
        model(gradients(rank, step)).backward()
        history.append(full_grads(model))
    state = handle.state_dict()
    handle.load_state_dict(state)
    return history, state


@pytest.mark.parametrize("codec", ("onebit", "int8"))
def test_replicas_average_in_codes(ranks, codec):
    steps, world = 10, 4
    results = ranks.run(replicas, codec, steps)
    for history, _ in results:
        for step in range(steps):
            for name, grad in history[step].items():
                assert_same_bits(grad, results[0][0][step][name], "replica")
    applied = sum(grads["last"].double() for grads in results[0][0])
    came_in = sum(
        gradients(r, s)["d"][:64].double() / world for s in range(steps) for r in range(world)
    )
    # The root module's only parameter: two shards of 32 elements, each coded by two replicas.
    held = torch.zeros(64, dtype=torch.float64)
    for rank, (_, state) in enumerate(results):
        worker, server = state[""]
        shard = slice(32 * (rank % 2), 32 * (rank % 2) + 32)
        held[shard] += worker.double() / 2
        start = 32 * (rank % 2) + sum(split_sizes(32, 2)[: rank // 2])
        held[start : start + server.numel()] += server.double()
    assert (applied + held - came_in).norm() <= 1e-6 * came_in.norm()
    assert (applied - came_in).norm() > 1e-4 * came_in.norm()
