"""Styles under torch's own tools: parallelize_module, clip_grad_norm_, AdamW, fully_shard, DCP.

The reference is the same model in one process, in float64. Adam divides by the gradient's size, so
updates are compared after SGD, whose steps are as exact as the gradients.
"""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from mcp_kernels.nn import ColumnParallel, ColumnParallelLinear, Replicated, RowParallel

# Sums of up to 100 products of order 1 in another order, through three layers and two steps.
BOUND = {"rtol": 1e-11, "atol": 1e-12}
# Odd everywhere that a rank's part may be: fully_shard takes uneven dim 0 only, so the width that
# it cuts in row-parallel weights (dim 0) may be odd as well.
VOCAB, WIDTH, INNER, BATCH, LENGTH = 13, 7, 10, 4, 6


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList([Mlp(), Mlp()])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


PLAN = {
    "embed": RowParallel(),
    "blocks.*.norm": Replicated(),
    "blocks.*.up": ColumnParallel(),
    "blocks.*.down": RowParallel(),
    "norm": Replicated(),
    "head": ColumnParallel(gather_output=True),
}
# The same with what lies between the layers cut along the sequence: each rank's norm sees a part.
SEQUENCE_PLAN = {
    "embed": RowParallel(sequence_parallel=True),
    "blocks.*.norm": Replicated(sums_gradients=True),
    "blocks.*.up": ColumnParallel(sequence_parallel=True),
    "blocks.*.down": RowParallel(sequence_parallel=True),
    "norm": Replicated(sums_gradients=True),
    "head": ColumnParallel(sequence_parallel=True, gather_output=True),
}
PLANS = {"plain": PLAN, "sequence": SEQUENCE_PLAN}


def make_net(seed=0):
    torch.manual_seed(seed)
    return Net().double()


def batch(step):
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCAB, (BATCH, LENGTH + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(model, tokens, targets):
    logits = model(tokens)
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def train(model, rows=slice(None), share=1.0):
    """Two clipped SGD steps; the norms before clipping."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
    norms = []
    for step in range(2):
        tokens, targets = batch(step)
        optimizer.zero_grad()
        (loss_of(model, tokens[rows], targets[rows]) * share).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=True)
        norms.append(norm.full_tensor().item() if isinstance(norm, DTensor) else norm.item())
        optimizer.step()
    return norms


def gathered(model):
    """Whole parameters by name, from any mixture of DTensors."""
    options = StateDictOptions(full_state_dict=True)
    return get_model_state_dict(model, options=options)


def assert_same(actual, expected):
    assert actual.keys() == expected.keys()
    for name, want in expected.items():
        torch.testing.assert_close(
            actual[name], want.detach(), **BOUND, msg=lambda m, n=name: n + m
        )


def run_clip(rank, world, plan):
    mesh = init_device_mesh("cpu", (world,))
    model = parallelize_module(make_net(), mesh, PLANS[plan])
    norms = train(model)
    return norms, {n: p.full_tensor().detach() for n, p in model.named_parameters()}


@pytest.mark.parametrize("plan", PLANS)
def test_clip_and_update_are_those_of_one_process(ranks, plan):
    net = make_net()
    expected = train(net)
    for norms, parameters in ranks.run(run_clip, plan, ranks=2):
        assert norms == pytest.approx(expected, rel=1e-12)
        assert_same(parameters, dict(net.named_parameters()))


def run_fully_shard(rank, world, plan, folder):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(make_net(), mesh["tp"], PLANS[plan])
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    # Each replica trains on its rows; fully_shard divides by their number, and the loss is a sum.
    half = BATCH // 2
    rows = slice(0, half) if mesh["dp"].get_local_rank() == 0 else slice(half, BATCH)
    norms = train(model, rows, share=2.0)
    assert isinstance(model.blocks[0].up, ColumnParallelLinear)
    assert all(p.device_mesh.ndim == 2 for p in model.parameters())
    dcp.save(get_model_state_dict(model), checkpoint_id=folder)
    trained = {n: p.full_tensor().detach() for n, p in model.named_parameters()}
    model.load_state_dict(make_net(seed=7).state_dict())  # whole tensors: each takes its part
    assert_same(
        {n: p.full_tensor().detach() for n, p in model.named_parameters()},
        dict(make_net(seed=7).named_parameters()),
    )
    return norms, trained


def run_load(rank, world, folder):
    """What (dp, tp) saved comes into tensor parallelism alone, and into a whole model."""
    model = parallelize_module(make_net(seed=5), init_device_mesh("cpu", (world,)), PLAN)
    state = get_model_state_dict(model)
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(model, state)
    return {n: p.full_tensor().detach() for n, p in model.named_parameters()}


@pytest.mark.filterwarnings("ignore:.*:UserWarning", "ignore:.*:FutureWarning")
@pytest.mark.parametrize("plan", PLANS)
def test_fully_shard_and_dcp_over_two_meshes(ranks, tmp_path, plan):
    net = make_net()
    expected = train(net)
    whole = dict(net.named_parameters())
    for norms, parameters in ranks.run(run_fully_shard, plan, str(tmp_path / plan)):
        assert norms == pytest.approx(expected, rel=1e-12)
        assert_same(parameters, whole)
    for parameters in ranks.run(run_load, str(tmp_path / plan), ranks=4):
        assert_same(parameters, whole)
    alone = make_net(seed=6)
    state = alone.state_dict()
    dcp.load(state, checkpoint_id=str(tmp_path / plan), no_dist=True)
    assert_same(state, whole)


def run_against_torch(rank, world, style):
    """Output and gradients of a pair of layers, under our styles or torch's."""
    torch.manual_seed(0)
    # Even: torch's styles lose the whole size between two layers.
    pair = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 5)).double()
    plans = {
        "ours": {"0": ColumnParallel(), "2": RowParallel()},
        "torch": {"0": ColwiseParallel(), "2": RowwiseParallel()},
    }
    parallelize_module(pair, init_device_mesh("cpu", (world,)), plans[style])
    x = torch.randn(3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    x.requires_grad_()
    y = pair(x)
    y.square().sum().backward()
    layout = {n: (p.placements, p.to_local().shape) for n, p in pair.named_parameters()}
    grads = {n: p.grad.full_tensor() for n, p in pair.named_parameters()}
    return y.detach(), x.grad, grads, layout


@pytest.mark.parametrize("world", [2, 4])
def test_styles_are_equal_to_torchs(ranks, world):
    ours = ranks.run(run_against_torch, "ours", ranks=world)
    theirs = ranks.run(run_against_torch, "torch", ranks=world)
    for (y, dx, grads, layout), (want_y, want_dx, want_grads, want_layout) in zip(
        ours, theirs, strict=True
    ):
        torch.testing.assert_close(y, want_y, **BOUND)
        torch.testing.assert_close(dx, want_dx, **BOUND)
        assert_same(grads, want_grads)
        assert layout == want_layout
    assert ours[0][3]["0.weight"][0] == (Shard(0),)
    assert ours[0][3]["2.bias"][0] == (Replicate(),)


def run_source(rank, world):
    """Values come from the first rank, or from each rank's own model where that is asked for."""
    mesh = init_device_mesh("cpu", (world,))
    model = parallelize_module(make_net(seed=rank), mesh, PLAN)
    mine = parallelize_module(make_net(seed=rank), mesh, PLAN, src_data_rank=None)
    return (
        model.norm.bias.full_tensor(),
        model.head.weight.full_tensor(),
        mine.head.weight.to_local(),
    )


def test_values_come_from_the_first_rank(ranks):
    results = ranks.run(run_source, ranks=2)
    for rank, (bias, head, mine) in enumerate(results):
        assert torch.equal(bias, make_net(seed=0).norm.bias)
        assert torch.equal(head, make_net(seed=0).head.weight)
        assert torch.equal(mine, make_net(seed=rank).head.weight.tensor_split((7,))[rank])


def run_refusals(rank, world):
    mesh = init_device_mesh("cpu", (world,))

    class Scaled(nn.Linear):
        pass

    raised = []
    for style, module in (
        (ColumnParallel(), nn.LayerNorm(3)),
        (ColumnParallel(), Scaled(3, 3)),
        (RowParallel(), ColumnParallelLinear(4, 4)),
        (ColumnParallel(heads=3), nn.Linear(3, 3)),
        (RowParallel(), nn.Embedding(3, 3, sparse=True)),
        (Replicated(), nn.ParameterList([nn.Parameter(torch.zeros(2))])),
    ):
        with pytest.raises(ValueError, match="must") as caught:
            parallelize_module(module, mesh, style)
        raised.append(str(caught.value))
    dist.barrier()
    return raised


def test_refusals(ranks):
    expected = [
        (
            "ColumnParallel: module must be nn.Linear itself, got LayerNorm; use Replicated() or "
            "leave it out of the plan"
        ),
        (
            "ColumnParallel: module must be nn.Linear itself, got Scaled; use Replicated() or "
            "leave it out of the plan"
        ),
        (
            "RowParallel: module must not be parallel yet, got ColumnParallelLinear; apply tensor "
            "parallelism once, and before fully_shard"
        ),
        "ColumnParallel: heads must be divisible by 2 ranks, got 3; use one of [1, 3] ranks",
        (
            "RowParallel: sparse must be off, got True: a rank sees its own rows alone; leave this "
            "table whole"
        ),
        (
            "Replicated: module must read its parameters in its own forward, got ParameterList; "
            "make a module of its own for them"
        ),
    ]
    assert ranks.run(run_refusals, ranks=2) == [expected] * 2
