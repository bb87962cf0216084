"""Sixteen bits where they are cheap and fp32 where it counts: rounding, masters, memory."""

import gc
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from mcp_kernels.nn._lookup import lookup
from mcp_parallel.config import Config, ParallelConfig
from mcp_parallel.layout import Layout
from mcp_parallel.model.loss import IGNORED, token_loss
from mcp_parallel.model.rotary import rotate
from mcp_parallel.parallel.gradients import GradientBuckets
from mcp_parallel.parallel.mesh import build_mesh
from mcp_parallel.parallel.shards import local_part
from mcp_parallel.step import TrainingStep

CPU = torch.device("cpu")
NARROW = [torch.bfloat16, torch.float16]


def configure(layout, **train):
    sizes = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 2}
    sizes |= {"preset": None, "ffn_size": 40, "vocab_size": 64, "seq_len": 16}
    base = Config.from_mapping({"model": sizes})
    defaults = {"global_batch_size": 4, "micro_batch_size": 2 // layout.dp, "warmup_steps": 0}
    parallel = replace(ParallelConfig(), dp=layout.dp, zero=layout.zero)
    return replace(base, parallel=parallel, train=replace(base.train, **defaults | train))


def batch(index, rows):
    generator = torch.Generator().manual_seed(index)
    tokens = torch.randint(64, (4, 17), generator=generator)[rows.start : rows.stop]
    return tokens[:, :-1], tokens[:, 1:]


# --- fp32 inside of the model -------------------------------------------------------------------


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("head_size", [16, 64])
def test_heads_of_16_bits_are_turned_in_fp32(dtype, head_size):
    x = torch.randn(1, 300, 2, head_size, generator=torch.Generator().manual_seed(1)).to(dtype)
    exact, _ = rotate(x.double(), x.double(), 10000.0)
    # Two products are added: half a unit of the sum, and fp32 roundings of the terms and the table.
    bound = 0.5 * torch.finfo(dtype).eps * exact.abs() + 4 * 2**-24 * x.abs().max().double() * 2
    assert ((rotate(x, x, 10000.0)[0].double() - exact).abs() <= bound + 2**-24).all()


@pytest.mark.parametrize("dtype", NARROW)
def test_the_loss_of_16_bit_logits_is_fp32(dtype):
    logits = (4 * torch.randn(2, 50, 300, generator=torch.Generator().manual_seed(2))).to(dtype)
    targets = torch.randint(300, (2, 50), generator=torch.Generator().manual_seed(3))
    targets[0, :7] = IGNORED
    loss = token_loss(logits, targets)
    assert loss.dtype == torch.float32
    exact = token_loss(logits.double(), targets)
    assert abs(loss.item() - exact.item()) <= 100 * 2**-23 * exact.item()


@pytest.mark.parametrize("dtype", NARROW)
def test_a_frequent_token_gets_its_whole_gradient(dtype):
    """torch's own sum for a bfloat16 table on CPU stops at 256 ones."""
    table = torch.zeros(3, 4, dtype=dtype, requires_grad=True)
    tokens = torch.tensor([1] * 4000 + [2] * 8)
    lookup(tokens, table).backward(torch.ones(4008, 4, dtype=dtype))
    assert table.grad.tolist() == [[0] * 4, [torch.tensor(4000).to(dtype).item()] * 4, [8] * 4]
    table.grad = None
    lookup(tokens, table, 1).backward(torch.ones(4008, 4, dtype=dtype))
    assert table.grad.tolist() == [[0] * 4, [0] * 4, [8] * 4]


# --- sums of gradients --------------------------------------------------------------------------


def accumulate(rank, world, dtype):
    """One gradient of 1 and fifteen too small to move a 16-bit 1; on two ranks, twice each."""
    parameters = [nn.Parameter(torch.zeros(5, dtype=dtype)), nn.Parameter(torch.zeros(2, 3))]
    master = torch.zeros(5)
    group = dist.group.WORLD if world > 1 else None
    buckets = GradientBuckets(parameters, group, {parameters[0]: master})
    small = torch.finfo(dtype).eps / 4
    found = []
    for _ in range(2):
        buckets.zero()
        for index in range(16):
            if index == 15:
                buckets.arm()
            size = 1.0 if index == 0 else small
            sum((p * size).sum() for p in parameters).backward()
            assert parameters[0].grad is None  # no 16-bit gradient is kept
        buckets.finish()
        found.append((master.grad.clone(), parameters[1].grad.clone()))
    return found


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("world", [1, 2])
def test_micro_batches_and_ranks_are_summed_in_fp32(ranks, dtype, world):
    expected = world * (1 + 15 * torch.finfo(dtype).eps / 4)
    for found in ranks.run(accumulate, dtype, ranks=world):
        for narrow, wide in found:
            assert torch.equal(narrow, torch.full((5,), expected))
            assert torch.equal(wide, torch.full((2, 3), expected))


# --- master weights -----------------------------------------------------------------------------


def small_updates(rank, world, layout, precision):
    """Twenty steps of a thousandth of a bf16 weight's own spacing each."""
    config = configure(layout, precision=precision, lr=1e-6, min_lr=1e-6, weight_decay=0.0)
    step = TrainingStep(config, build_mesh(layout, CPU))
    before = [shard.local.clone() for shard in step.shards]
    for index in range(20):
        step(*batch(index % 2, step.rows()), 1e-6)
    moved = torch.cat([(s.local - b).flatten() for s, b in zip(step.shards, before, strict=True)])
    spacing = torch.cat([b.abs().flatten() for b in before]) * 2.0**-8
    rounded = all(
        torch.equal(local_part(s.parameter.detach()), s.master.to(torch.bfloat16))
        for s in step.shards
        if s.master is not None
    )
    dtypes = {s.local.dtype for s in step.shards}
    return moved, spacing, rounded, dtypes


@pytest.mark.parametrize("layout", [Layout(), Layout(dp=2, zero=3)], ids=str)
def test_updates_below_the_spacing_of_16_bits_are_not_lost(ranks, layout):
    results = ranks.run(small_updates, layout, "bf16", ranks=layout.world_size)
    full = ranks.run(small_updates, layout, "fp32", ranks=layout.world_size)
    for (moved, spacing, rounded, dtypes), (wanted, *_) in zip(results, full, strict=True):
        assert dtypes == {torch.float32}
        assert rounded
        # A step is less than half the spacing of nearly all: 16-bit weights would stand still.
        assert (spacing > 2 * 1e-6).float().mean() > 0.95
        # Adam moves an element by about the rate in each step, as it does in fp32.
        assert moved.abs().mean() > 0.9 * wanted.abs().mean()
        cosine = (moved @ wanted / moved.norm() / wanted.norm()).item()
        assert cosine > 0.95


def test_updates_reach_the_weights_that_forward_uses():
    config = configure(Layout(), precision="bf16", lr=1e-5, min_lr=1e-5, weight_decay=0.0)
    step = TrainingStep(config, build_mesh(Layout(), CPU))
    first = step(*batch(0, step.rows()), 1e-5).loss
    before = [s.parameter.detach().clone() for s in step.shards]
    for _ in range(60):
        last = step(*batch(0, step.rows()), 1e-5).loss
    changed = [(s.parameter != b).float().mean() for s, b in zip(step.shards, before, strict=True)]
    assert max(changed) > 0.5
    assert last < first - 1e-3


# --- memory -------------------------------------------------------------------------------------


def storages():
    """Bytes of each float storage that is alive, by address."""
    gc.collect()
    found = {}
    for thing in gc.get_objects():
        # isinstance would ask torch's deprecated proxies, which warn.
        if (
            issubclass(type(thing), torch.Tensor)
            and thing.is_floating_point()
            and not thing.is_meta
            and thing.layout == torch.strided
        ):
            for tensor in (thing, getattr(thing, "grad", None) if thing.is_leaf else None):
                if tensor is not None:
                    storage = local_part(tensor.detach()).untyped_storage()
                    # A fake tensor that a trace left behind calls itself a CPU tensor.
                    if storage.device.type == "cpu":
                        found[storage.data_ptr()] = storage.nbytes()
    found.pop(0, None)
    return found


def resident_bytes(rank, world, layout, precision):
    """Bytes a parameter of the whole model that stay on this rank after a step."""
    config = configure(layout, precision=precision)
    before = storages()
    step = TrainingStep(config, build_mesh(layout, CPU))
    for index in range(2):
        step(*batch(index, step.rows()), 1e-3)
    kept = storages()
    parameters = sum(torch.Size(s.global_shape).numel() for s in step.shards)
    return sum(size for at, size in kept.items() if at not in before) / parameters


@pytest.mark.parametrize(
    "layout, precision, expected",
    [
        (Layout(), "fp32", 4 + 4 + 8),
        (Layout(), "bf16", 2 + 4 + 4 + 8),  # weights twice, gradient sums, two moments
        (Layout(dp=2), "bf16", 2 + 4 + 4 + 8),
        (Layout(dp=2, zero=3), "bf16", (4 + 4 + 8) / 2),
    ],
)
def test_there_is_no_third_copy_of_the_weights(ranks, layout, precision, expected):
    for found in ranks.run(resident_bytes, layout, precision, ranks=layout.world_size):
        # Beside it only tables of angles and counters, a hundredth of so small a model.
        assert expected <= found <= expected * 1.1 + 0.5
