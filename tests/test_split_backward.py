"""A backward in two halves: the same gradients, and together the work of one."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from mcp_kernels.nn import (
    ColumnParallelLinear,
    RowParallelLinear,
    SplitLinear,
    deferred_weight_gradients,
    split_linears,
)
from mcp_parallel.config import Config
from mcp_parallel.layout import Layout
from mcp_parallel.parallel.mesh import build_mesh
from mcp_parallel.step import TrainingStep

# --- layers --------------------------------------------------------------------------------------


def gradients(model, x, dy, *, in_halves):
    """Gradients of x and of every parameter, and how many weights had none after the first half."""
    x = x.clone().requires_grad_()
    model.zero_grad()
    missing = 0
    if in_halves:
        with deferred_weight_gradients() as undone:
            model(x).backward(dy)
        missing = sum(p.grad is None for p in model.parameters())
        undone.run()
        assert len(undone) == 0
    else:
        model(x).backward(dy)
    found = [p.grad for p in model.parameters()]
    return [x.grad, *(getattr(g, "_local_tensor", g) for g in found)], missing


def assert_same_in_halves(model, x, dy, weights):
    whole, _ = gradients(model, x, dy, in_halves=False)
    halves, missing = gradients(model, x, dy, in_halves=True)
    assert missing == weights
    for a, b in zip(whole, halves, strict=True):
        # The same products of the same numbers; only their grouping over ranks may differ.
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("bias", [True, False])
def test_a_plain_layer_leaves_its_weight_for_later(bias):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 5, bias=bias), nn.Tanh(), nn.Linear(5, 3, bias=bias))
    model.double()
    before = dict(model.named_parameters())
    split_linears(model)
    assert isinstance(model[0], SplitLinear)
    assert all(dict(model.named_parameters())[name] is p for name, p in before.items())
    x, dy = torch.randn(2, 63, 7).double(), torch.randn(2, 63, 3).double()
    assert_same_in_halves(model, x, dy, weights=2)
    assert torch.autograd.gradcheck(model, (x[:, :2].clone().requires_grad_(),))


def test_gradients_of_several_backwards_add_up_in_any_order():
    torch.manual_seed(0)
    layer = SplitLinear.from_linear(nn.Linear(3, 4, bias=False).double())
    xs = torch.randn(3, 5, 3).double()
    halves = []
    for x in xs:
        with deferred_weight_gradients() as undone:
            layer(x).sum().backward()
        halves.append(undone)
    layer(xs[0]).sum().backward()  # a whole one among them
    for undone in reversed(halves):
        undone.run()
    expected = xs.sum((0, 1)) + xs[0].sum(0)
    torch.testing.assert_close(layer.weight.grad, expected.expand(4, 3), rtol=0, atol=1e-12)


def test_a_weight_is_not_read_in_the_second_half():
    weight = nn.Parameter(torch.randn(4, 3))
    layer = SplitLinear.from_linear(nn.Linear(3, 4, bias=False))
    layer.weight = weight
    with deferred_weight_gradients() as undone:
        layer(torch.ones(2, 3)).sum().backward()
    weight.untyped_storage().resize_(0)  # as fully_shard frees a parameter
    undone.run()
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.full((4, 3), 2.0))


def test_halves_do_not_nest():
    with (
        deferred_weight_gradients(),
        pytest.raises(RuntimeError, match="must not be inside"),
        deferred_weight_gradients(),
    ):
        pass


def run_parallel(rank, world, sequence_parallel, save_gathered):
    from mcp_kernels.nn import apply_linears
    from mcp_kernels.nn.sharding import to_locals
    from mcp_kernels.ops.all_gather_matmul import all_gather_matmul

    warnings.simplefilter("ignore")
    group = dist.group.WORLD
    kwargs: dict[str, Any] = {
        "bias": False,
        "group": group,
        "sequence_parallel": sequence_parallel,
        "dtype": torch.float64,
    }
    torch.manual_seed(0)
    columns = [ColumnParallelLinear(8, n, **kwargs) for n in (8, 4)]
    row = RowParallelLinear(8, 8, **kwargs)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([*columns, row])

        def forward(self, x):
            if save_gathered:
                wide, narrow = apply_linears(x, columns)
            else:
                locals_ = to_locals([c.weight for c in columns])
                wide, narrow = all_gather_matmul(
                    x, locals_, group=group, gather_dim=-2, save_gathered=False
                )
            return row(wide * narrow.repeat(1, 1, 2))

    length = 6 // world if sequence_parallel else 6
    generator = torch.Generator().manual_seed(rank if sequence_parallel else 0)
    x, dy = torch.randn(2, 2, length, 8, generator=generator, dtype=torch.float64)
    assert_same_in_halves(Model(), x, dy, weights=3)


@pytest.mark.parametrize(
    "sequence_parallel, save_gathered", [(True, True), (True, False), (False, True)]
)
def test_parallel_layers_leave_their_weights_for_later(ranks, sequence_parallel, save_gathered):
    ranks.run(run_parallel, sequence_parallel, save_gathered, ranks=2)


# --- the trainer ---------------------------------------------------------------------------------

MODEL = {
    "preset": None,
    "num_layers": 4,
    "hidden_size": 16,
    "num_heads": 4,
    "num_kv_heads": 2,
    "ffn_size": 24,
    "vocab_size": 256,
    "seq_len": 16,
}
SIZES_OF = ("aten::mm", "aten::addmm", "aten::addmm_")


def train(parallel, checkpointing, *, steps=1, count=False):
    """Losses and norms of a few steps, and their matmul flops and collectives."""
    warnings.simplefilter("ignore")
    config = Config.from_mapping(
        {
            "model": MODEL,
            "parallel": parallel,
            "train": {"global_batch_size": 8, "micro_batch_size": 2 // parallel.get("dp", 1)},
            "memory": {"activation_checkpointing": checkpointing},
        }
    )
    mesh = build_mesh(Layout.from_config(config.parallel), torch.device("cpu"))
    assert mesh is not None
    step = TrainingStep(config, mesh)
    rows = step.rows()
    tokens = torch.randint(0, 256, (8, 17), generator=torch.Generator().manual_seed(0))
    inputs, targets = tokens[rows.start : rows.stop, :-1], tokens[rows.start : rows.stop, 1:]
    figures = []
    with torch.autograd.profiler.profile(enabled=count, record_shapes=True) as profile:
        for _ in range(steps):
            result = step(inputs.contiguous(), targets.contiguous(), 1e-3)
            figures.append((result.loss, result.grad_norm))
    events = profile.function_events if profile is not None else None
    return figures, count_work(events) if events is not None else None


def count_work(events):
    """Flops of the matmuls and number of the ops of ours and the collectives over tp, summed."""
    work = Counter()
    for event in events:
        if event.name in SIZES_OF:
            a, b = [shape for shape in event.input_shapes if len(shape) == 2][-2:]
            work["flops"] += 2 * a[0] * a[1] * b[1]
        elif event.name.startswith("mcp_kernels::flash_attn"):
            work[event.name] += 1
        elif event.name.startswith("c10d::") and event.name not in ("c10d::send", "c10d::recv_"):
            work["collectives"] += 1
    return work


def count_on_rank(rank, world, parallel):
    return train(parallel, "none", count=True)[1]


@pytest.mark.parametrize(
    "parallel",
    [
        {"pp": 2, "tp": 2, "schedule": "zbv"},
        {"pp": 2, "tp": 2, "schedule": "zero_bubble", "sequence_parallel": False},
        {"pp": 2, "schedule": "dualpipev"},
    ],
    ids=["zbv tp2", "zero_bubble tp2 no-sp", "dualpipev"],
)
def test_a_split_backward_does_the_work_of_a_whole_one(ranks, parallel):
    world = parallel["pp"] * parallel.get("tp", 1)
    split = sum(ranks.run(count_on_rank, parallel, ranks=world), Counter())
    whole = sum(ranks.run(count_on_rank, {**parallel, "schedule": "1f1b"}, ranks=world), Counter())
    # Each rank of a tp group runs each of 4 layers for each of 4 micro-batches.
    assert whole["mcp_kernels::flash_attn_bwd"] == 16 * parallel.get("tp", 1)
    assert whole["flops"] > 0
    assert split == whole


def compare_checkpointing(rank, world, parallel):
    return [train(parallel, policy, steps=2)[0] for policy in ("none", "selective", "full")]


@pytest.mark.parametrize("schedule, zero", [("zbv", 3), ("dualpipev", 0)])
def test_checkpointing_goes_with_a_split_backward_bit_for_bit(ranks, schedule, zero):
    parallel = {"pp": 2, "dp": 2 if zero else 1, "zero": zero, "schedule": schedule}
    for policies in ranks.run(compare_checkpointing, parallel, ranks=2 * parallel["dp"]):
        assert policies[0] == policies[1] == policies[2]
