"""Every op under ``torch.compile(fullgraph=True)``: right, and one graph for all lengths."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from graphs import Graphs
from test_transform_table import TABLE, loss_of, stacked
from torch import Tensor, nn
from torch.func import grad, vmap
from transform_cases import Case, cases, draw

import mcp_kernels as m
from mcp_kernels.nn import ColumnParallelLinear, FlashAttention, RowParallelLinear

pytestmark = pytest.mark.slow

LENGTHS = (7, 18, 61, 40)


@pytest.fixture(autouse=True)
def forget_graphs():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def assert_same(compiled: Callable[..., Tensor], case: Case, length: int) -> None:
    """Result and gradient as without a compiler, from values of their own."""
    found = []
    for call in (compiled, case.call):
        x, *rest = case.make(length)
        x.requires_grad_(case.exact is not None)
        out = call(x, *rest)
        grads = torch.autograd.grad(out.square().sum(), x) if out.requires_grad else ()
        found.append((out, *grads))
    assert len(found[1]) == (1 if case.exact is None else 2)
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("name", TABLE)
def test_a_full_graph_is_right(name: str) -> None:
    assert TABLE[name][4] == "yes"
    case = cases()[name]
    compiled = torch.compile(case.call, fullgraph=True, dynamic=False, backend="aot_eager")
    assert_same(compiled, case, LENGTHS[0])


@pytest.mark.parametrize("name", TABLE)
def test_lengths_share_a_graph(name: str) -> None:
    assert TABLE[name][5] == "yes"
    graphs, case = Graphs(), cases()[name]
    compiled = torch.compile(case.call, fullgraph=True, dynamic=True, backend=graphs)
    for length in LENGTHS:
        assert_same(compiled, case, length)
    assert graphs.count == 1


@pytest.mark.parametrize("name", [name for name, cells in TABLE.items() if cells[2] == "yes"])
def test_transforms_stand_inside_a_graph(name: str) -> None:
    case = cases()[name]
    args, dims = stacked(case)
    function = vmap(grad(loss_of(case.call)), dims)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*args), function(*args))


ATTENTION = {
    "plain": {},
    "scale, softcap": {"softmax_scale": 0.3, "softcap": 3.5, "causal": True},
    "window": {"window_size": (5, 2)},
    "dropout": {"dropout_p": 0.1},
}


@pytest.mark.parametrize("name", ATTENTION)
def test_numbers_of_a_module_begin_no_second_graph(name: str) -> None:
    graphs, module = Graphs(), FlashAttention(**ATTENTION[name])
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend=graphs)
    for length in LENGTHS:
        x = draw(2, length, 2, 4)
        out, wanted = compiled(x, x, x), module(x, x, x)
        if name != "dropout":  # whose masks differ from call to call
            torch.testing.assert_close(out, wanted)
    assert graphs.count == 1


def test_a_changed_number_is_a_new_graph_not_the_old_one() -> None:
    module, x = FlashAttention(softcap=3.5), draw(1, 5, 2, 4)
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend="aot_eager")
    for softcap in (3.5, 0.5):
        module.softcap = softcap
        torch.testing.assert_close(compiled(x, x, x), module(x, x, x))


def test_pages_are_found_inside_a_graph() -> None:
    """Sequences of which one is empty, over pages in any order; entries past an end are garbage."""
    graphs = Graphs()

    def call(q: Tensor, keys: Tensor, values: Tensor, ends: Tensor, table: Tensor) -> Tensor:
        args = (q, keys, values, ends, ends, q.shape[0], q.shape[0])
        return m.flash_attn_varlen_func(*args, causal=True, block_table=table)

    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend=graphs)
    table = torch.tensor([[3, 1, -9], [7, 7, 7], [0, 4, 2]])
    for lengths in ([7, 0, 9], [4, 0, 12], [0, 0, 0], [8, 0, 1]):
        ends = torch.tensor([0, *lengths]).cumsum(0)
        leaves = [draw(16, 2, 4), *(draw(5, 4, 1, 4) for _ in range(2))]
        for leaf in leaves:
            leaf.requires_grad_()
        outs = [f(*leaves, ends, table) for f in (compiled, call)]
        torch.testing.assert_close(*outs)
        torch.testing.assert_close(
            *(torch.autograd.grad(out.square().sum(), leaves) for out in outs)
        )
    assert graphs.count == 1


def over_ranks(rank: int, world: int) -> dict[str, int]:
    """Graphs of each function of a group for all lengths, the ranks' parts even or not."""
    weight = draw(6, 4) * (rank + 1)
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "all_reduce": lambda x: m.all_reduce(x),
        "reduce_scatter": lambda x: m.reduce_scatter(x, scatter_dim=1),
        "all_gather": lambda x: m.all_gather(x, gather_dim=1),
        "copy_to_group": lambda x: m.copy_to_group(x),
        "matmul_all_reduce": lambda x: m.matmul_all_reduce(x, weight),
        "matmul_reduce_scatter": lambda x: m.matmul_reduce_scatter(x, weight, scatter_dim=1),
        "all_gather_matmul": lambda x: m.all_gather_matmul(x, weight, gather_dim=1),
        "ColumnParallelLinear": ColumnParallelLinear(4, 6, gather_output=True).double(),
        "RowParallelLinear": RowParallelLinear(4, 6, input_is_parallel=False).double(),
    }
    counts = {}
    for name, function in functions.items():
        torch._dynamo.reset()
        graphs = Graphs()
        compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=graphs)
        for length in (8, 18, 40):  # none that a weight has, else torch takes them for one
            found = []
            for call in (compiled, function):
                x = draw(3, length, 4).requires_grad_()
                out = call(x)
                found.append((out, *torch.autograd.grad(out.square().sum(), x)))
            torch.testing.assert_close(*found)
        counts[name] = graphs.count
    torch._dynamo.reset()
    return counts


# torch makes an object of a Function when it traces one, which it warns of itself.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_lengths_share_a_graph_over_ranks(ranks) -> None:
    for counts in ranks.run(over_ranks, ranks=2):
        assert counts == dict.fromkeys(counts, 1)


def test_functions_take_layers() -> None:
    """A layer of one process is a module as any: what is compiled around it is one graph."""
    graphs = Graphs()
    model = nn.Sequential(ColumnParallelLinear(4, 6), nn.GELU(), RowParallelLinear(6, 4)).double()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=graphs)
    for length in LENGTHS:
        x = draw(length, 4)
        torch.testing.assert_close(compiled(x), model(x))
    assert graphs.count == 1
