"""Column- and row-parallel layers against nn.Linear and nn.Embedding in one process, in float64.

Every rank computes the same loss, so a replicated value counts once. Bounds: sums of at most 40
products of order 1, twice reordered, are off by a few 1e-15; 1e-12 leaves two digits and is far
below any wrong element.
"""

import copy
import itertools
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from mcp_kernels.nn import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    apply_linears,
)

BOUND = {"rtol": 0, "atol": 1e-12}
SEQUENCE = 8  # divided by 2 and 4 ranks


def make_linear(in_features, out_features, bias, seed=0):
    torch.manual_seed(seed)
    return nn.Linear(in_features, out_features, bias, dtype=torch.float64)


def draw(*shape, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def part(whole, dim, rank, world):
    """Cut as torch.chunk cuts, empty tails included."""
    step = -(-whole.shape[dim] // world)
    start = min(rank * step, whole.shape[dim])
    return whole.narrow(dim, start, min(step, whole.shape[dim] - start))


def whole_grads(module):
    grads = {name: p.grad for name, p in module.named_parameters()}
    assert all(isinstance(g, DTensor) for g in grads.values())
    return {name: g.full_tensor() for name, g in grads.items()}


# Features that the ranks divide, that they do not, and fewer than ranks.
SIZES = [(8, 12), (7, 5), (3, 2)]
LEADS = [(SEQUENCE,), (2, SEQUENCE), (3, 2, SEQUENCE)]
# sizes, leading dims, bias, sequence_parallel, the layer's own option: sizes and leading dims meet
# once each, since they enter at different places.
GRID = [
    (sizes, lead, *flags)
    for sizes, lead in zip(SIZES, LEADS, strict=True)
    for flags in itertools.product([True, False], repeat=3)
]


def run_columns(rank, world):
    results = []
    for (n_in, n_out), lead, bias, sequence, gather in GRID:
        layer = ColumnParallelLinear.from_linear(
            make_linear(n_in, n_out, bias), sequence_parallel=sequence, gather_output=gather
        )
        x = draw(*lead, n_in)
        mine = part(x, -2, rank, world) if sequence else x
        mine = mine.clone().requires_grad_()
        y = layer(mine)
        dy = draw(*lead, n_out, seed=2)
        (y * (dy if gather else part(dy, -1, rank, world))).sum().backward()
        results.append((y.detach(), mine.grad, whole_grads(layer)))
    return results


def run_rows(rank, world):
    results = []
    for (n_in, n_out), lead, bias, sequence, is_parallel in GRID:
        layer = RowParallelLinear.from_linear(
            make_linear(n_in, n_out, bias),
            sequence_parallel=sequence,
            input_is_parallel=is_parallel,
        )
        x = draw(*lead, n_in)
        mine = part(x, -1, rank, world) if is_parallel else x
        mine = mine.clone().requires_grad_()
        y = layer(mine)
        dy = draw(*lead, n_out, seed=2)
        (y * (part(dy, -2, rank, world) if sequence else dy)).sum().backward()
        results.append((y.detach(), mine.grad, whole_grads(layer)))
    return results


def reference(n_in, n_out, bias, lead):
    linear = make_linear(n_in, n_out, bias)
    x = draw(*lead, n_in).requires_grad_()
    y = linear(x)
    (y * draw(*lead, n_out, seed=2)).sum().backward()
    return y.detach(), x.grad, {name: p.grad for name, p in linear.named_parameters()}


def assert_grads(actual, expected):
    assert actual.keys() == expected.keys()
    for name, grad in expected.items():
        torch.testing.assert_close(actual[name], grad, **BOUND)


@pytest.mark.parametrize("world", [2, 4])
def test_column_layer_is_the_whole_layer_cut_by_outputs(ranks, world):
    by_rank = ranks.run(run_columns, ranks=world)
    for case, (sizes, lead, bias, sequence, gather) in enumerate(GRID):
        y, dx, grads = reference(*sizes, bias, lead)
        for rank, results in enumerate(by_rank):
            got_y, got_dx, got_grads = results[case]
            want_dx = part(dx, -2, rank, world) if sequence else dx
            want_y = y if gather else part(y, -1, rank, world)
            torch.testing.assert_close(got_y, want_y, **BOUND)
            torch.testing.assert_close(got_dx, want_dx, **BOUND)
            assert_grads(got_grads, grads)


@pytest.mark.parametrize("world", [2, 4])
def test_row_layer_is_the_whole_layer_cut_by_inputs(ranks, world):
    by_rank = ranks.run(run_rows, ranks=world)
    for case, (sizes, lead, bias, sequence, is_parallel) in enumerate(GRID):
        y, dx, grads = reference(*sizes, bias, lead)
        for rank, results in enumerate(by_rank):
            got_y, got_dx, got_grads = results[case]
            want_y = part(y, -2, rank, world) if sequence else y
            want_dx = part(dx, -1, rank, world) if is_parallel else dx
            torch.testing.assert_close(got_y, want_y, **BOUND)
            torch.testing.assert_close(got_dx, want_dx, **BOUND)
            assert_grads(got_grads, grads)


def make_table(num_rows):
    torch.manual_seed(0)
    return nn.Embedding(num_rows, 3, padding_idx=4, dtype=torch.float64)


def run_embedding(rank, world, num_rows, sequence):
    table = make_table(num_rows)
    layer = VocabParallelEmbedding.from_embedding(table, sequence_parallel=sequence)
    tokens = torch.arange(2 * SEQUENCE).view(2, SEQUENCE) * 7 % num_rows
    y = layer(tokens)
    dy = draw(2, SEQUENCE, 3)
    (y * (part(dy, 1, rank, world) if sequence else dy)).sum().backward()
    top = num_rows - 1
    with pytest.raises(
        IndexError, match=rf"tokens must be in \[0, {top}\], got {top} to {top + 1}"
    ):
        layer(torch.tensor([top, top + 1, top, top]))
    return y.detach(), whole_grads(layer)["weight"], table(tokens).detach()


@pytest.mark.parametrize("sequence", [True, False])
@pytest.mark.parametrize("world, num_rows", [(2, 37), (4, 37), (4, 5)])  # 4 of 5: 2, 2, 1 and none
def test_embedding_is_the_whole_table(ranks, world, num_rows, sequence):
    results = ranks.run(run_embedding, num_rows, sequence, ranks=world)
    table = make_table(num_rows)
    tokens = torch.arange(2 * SEQUENCE).view(2, SEQUENCE) * 7 % num_rows
    (table(tokens) * draw(2, SEQUENCE, 3)).sum().backward()
    for rank, (y, grad, whole) in enumerate(results):
        assert torch.equal(y, part(whole, 1, rank, world) if sequence else whole)
        torch.testing.assert_close(grad, table.weight.grad, **BOUND)


def run_together(rank, world, sequence):
    """Collectives and gradients of q, k and v in one call and in three."""
    found = []
    for together in (True, False):
        layers = [
            ColumnParallelLinear.from_linear(
                make_linear(6, n, True, seed=n), sequence_parallel=sequence
            )
            for n in (8, 4, 5)
        ]
        x = draw(2, SEQUENCE, 6)
        mine = (part(x, -2, rank, world) if sequence else x).clone().requires_grad_()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            ys = apply_linears(mine, layers) if together else [layer(mine) for layer in layers]
            sum((y * y).sum() for y in ys).backward()
        count = sum(e.count for e in profile.key_averages() if e.key.startswith("c10d::"))
        found.append((count, mine.grad, [layer.weight.grad.to_local() for layer in layers]))
    return found


@pytest.mark.parametrize("sequence", [True, False])
def test_layers_on_one_input_communicate_once(ranks, sequence):
    for (count, dx, dws), (count_alone, dx_alone, dws_alone) in ranks.run(
        run_together, sequence, ranks=2
    ):
        assert 3 * count == count_alone
        assert count > 0
        torch.testing.assert_close(dx, dx_alone, rtol=0, atol=1e-11)  # of values near 50
        for a, b in zip(dws, dws_alone, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


def run_places(rank, world):
    """Groups, meshes and sub-groups; each pair of ranks has a layer of its own."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    linear = make_linear(6, 4, True, seed=rank // 2)
    by_mesh = ColumnParallelLinear.from_linear(linear, group=mesh["tp"])
    by_group = ColumnParallelLinear.from_linear(linear, group=mesh["tp"].get_group())
    x = draw(3, 6)
    assert torch.equal(by_mesh(x), by_group(x))
    assert torch.equal(by_mesh.weight.full_tensor(), linear.weight)
    assert by_group.group.size() == 2
    with pytest.raises(ValueError, match=r"mesh must be 1-D, got \(2, 2\).*mesh\['dp'\] or"):
        ColumnParallelLinear.from_linear(linear, group=mesh)
    with pytest.raises(ValueError, match="group must be a ProcessGroup this rank belongs to"):
        ColumnParallelLinear.from_linear(linear, group=dist.GroupMember.NON_GROUP_MEMBER)
    return by_mesh(x).detach()


def test_a_layer_lives_on_any_group_or_mesh(ranks):
    outs = ranks.run(run_places)
    for pair in (0, 1):
        want = make_linear(6, 4, True, seed=pair)(draw(3, 6)).detach()
        torch.testing.assert_close(torch.cat(outs[2 * pair : 2 * pair + 2], -1), want, **BOUND)


def run_values(rank, world):
    """Initial values, copies and state dicts."""
    torch.manual_seed(100 + rank)  # ranks need not have the same seed
    made = ColumnParallelLinear(6, 5, dtype=torch.float64)
    after = torch.rand(1)
    torch.manual_seed(100 + rank)
    late = ColumnParallelLinear(6, 5, dtype=torch.float64, device="meta")
    assert late.weight.is_meta
    late.to_empty(device="cpu")
    late.reset_parameters()
    row = RowParallelLinear(6, 5, dtype=torch.float64)
    table = VocabParallelEmbedding(5, 3, padding_idx=1, dtype=torch.float64)
    assert not table.weight.full_tensor()[1].any()

    twin = copy.deepcopy(made)
    assert twin.weight is not made.weight
    x = draw(2, 6)
    assert torch.equal(twin(x), made(x))
    twin(x).sum().backward()
    assert made.weight.grad is None

    other = ColumnParallelLinear(6, 5, dtype=torch.float64)
    other.load_state_dict(made.state_dict())
    assert torch.equal(other.weight.full_tensor(), made.weight.full_tensor())
    whole = make_linear(6, 5, True, seed=9)
    for layer in (made, row):
        layer.load_state_dict(whole.state_dict())  # a whole state dict: each takes its part
        assert torch.equal(layer.weight.full_tensor(), whole.weight)
        assert torch.equal(layer.bias.full_tensor(), whole.bias)
    with pytest.raises(RuntimeError, match="size mismatch for weight"):
        made.load_state_dict(make_linear(6, 4, True).state_dict())
    return [p.full_tensor().detach() for p in (late.weight, late.bias)], after, repr(made)


def test_values_copies_and_state(ranks):
    results = ranks.run(run_values)
    for rank, (values, after, shown) in enumerate(results):
        torch.manual_seed(100)
        linear = nn.Linear(6, 5, dtype=torch.float64)
        assert torch.equal(values[0], linear.weight)  # the first rank's, on all
        assert torch.equal(values[1], linear.bias)
        torch.manual_seed(100 + rank)
        nn.Linear(6, 5, dtype=torch.float64)
        assert torch.equal(after, torch.rand(1))  # every generator moved as by nn.Linear
        assert "in_features=6, out_features=5, bias=True" in shown
        assert "ranks=4, weight S(0)" in shown


def run_errors(rank, world):
    column = ColumnParallelLinear(6, 4)
    row = RowParallelLinear(6, 4, sequence_parallel=True)
    whole_row = RowParallelLinear(6, 4, input_is_parallel=False)
    raised = []
    for call in (
        lambda: column(torch.zeros(2, 5)),
        lambda: row(torch.zeros(2, 6)),
        lambda: whole_row(torch.zeros(2, 3)),
        lambda: row(torch.zeros(3, 3)),
        lambda: apply_linears(torch.zeros(2, 6), [column, nn.Linear(6, 4)]),
        lambda: apply_linears(
            torch.zeros(2, 6), [column, ColumnParallelLinear(6, 4, sequence_parallel=True)]
        ),
        lambda: ColumnParallelLinear.from_linear(column),
        lambda: VocabParallelEmbedding.from_embedding(nn.Embedding(4, 2, max_norm=1.0)),
    ):
        with pytest.raises(ValueError, match="must") as caught:
            call()
        raised.append(str(caught.value))
    return raised


def test_errors_say_what_is_wrong_and_what_to_do(ranks):
    expected = [
        "ColumnParallelLinear: x must have 6 features, got 5",
        (
            "RowParallelLinear: x must have 3 features, this rank's part of the input; give the "
            "whole input with input_is_parallel=False, got 6"
        ),
        "RowParallelLinear: x must have 6 features, the whole input, got 3",
        (
            "RowParallelLinear: x must have a multiple of 2 positions in dim -2 with "
            "sequence_parallel, got 3; give every layer sequence_size=3, pad the sequence or turn "
            "it off"
        ),
        (
            "apply_linears: layers must all be ColumnParallelLinear or all plain, got Linear among "
            "them"
        ),
        (
            "apply_linears: layers must have one group, sequence_parallel, sequence_dim and "
            "sequence_size, got several; call them one by one"
        ),
        (
            "ColumnParallelLinear: module must hold whole parameters, got a DTensor (S(0)); it is "
            "parallel already"
        ),
        (
            "VocabParallelEmbedding: max_norm must be off, got 1.0: a rank sees its own rows "
            "alone; leave this table whole"
        ),
    ]
    assert ranks.run(run_errors, ranks=2) == [expected] * 2


def test_one_process_is_the_torch_module_bit_for_bit():
    linear = nn.Linear(5, 3)
    x = torch.randn(2, 4, 5)
    for cls, options in (
        (ColumnParallelLinear, {"sequence_parallel": True, "gather_output": True}),
        (RowParallelLinear, {"sequence_parallel": True, "input_is_parallel": False}),
    ):
        layer = cls.from_linear(linear, **options)
        assert torch.equal(layer(x), linear(x))
        assert layer.weight.data_ptr() != linear.weight.data_ptr()
        assert layer.group is None
        assert "whole" in repr(layer)
        again = pickle.loads(pickle.dumps(layer))
        assert torch.equal(again(x), linear(x))
    assert torch.equal(apply_linears(x, [linear])[0], linear(x))
    torch.manual_seed(3)
    made = RowParallelLinear(5, 3)
    torch.manual_seed(3)
    assert torch.equal(made.weight, nn.Linear(5, 3).weight)
