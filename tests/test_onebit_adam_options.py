"""OneBitAdam in company: switching, groups, DDP, 16 bits, loss scaling, bytes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from onebit_models import BLOCK, gradients, make_params, set_gradients
from torch.nn.parallel import DistributedDataParallel

from mcp_kernels.ops._code_exchange import uncompressed_bytes, wire_bytes
from mcp_kernels.ops._codecs import ONEBIT
from mcp_kernels.optim import OneBitAdam
from mcp_kernels.testing import assert_same_bits, make_gradient

LR, BETAS = 1e-2, (0.9, 0.8)
INTERVAL = 5  # 1 / (1 - 0.8): the variance's memory, between looks of the automatic switch


def step_once(optimizer, params, rank, step, factor=1.0):
    set_gradients(params, [g * factor for g in gradients(rank, step)])
    optimizer.step()


# --- the switch ---------------------------------------------------------------------------------


def automatic(rank, world, own_groups, wanders):
    """Steps of stage 1; with ``own_groups`` ranks are pipeline stages that share the norm alone."""
    group = None
    if own_groups:
        for member in range(world):
            made = dist.new_group([member])
            group = made if member == rank else group
    params = make_params()
    optimizer = OneBitAdam(
        params, lr=LR, betas=BETAS, block_size=BLOCK, group=group, norm_group=dist.group.WORLD
    )
    for step in range(20 * INTERVAL):
        # A gradient that doubles between looks, on some ranks and for a while.
        doublings = step / INTERVAL if rank in wanders and step < 5 * INTERVAL else 0
        step_once(optimizer, params, rank, 0, 2**doublings)
        if optimizer.is_compressing:
            break
    return optimizer.switch_step


def test_automatic_switch_needs_every_rank(ranks):
    """Looks are at multiples of the interval; the step after a vote is the last of stage 1."""
    still = ranks.run(automatic, True, (), ranks=2)
    assert still == [2 * INTERVAL + 1] * 2
    one_wanders = ranks.run(automatic, True, (1,), ranks=2)
    assert one_wanders[0] == one_wanders[1] >= 6 * INTERVAL + 1


def test_automatic_switch_waits_for_the_warm_up():
    params = make_params()
    optimizer = OneBitAdam(params, lr=LR, betas=BETAS, block_size=BLOCK)
    for step in range(6 * INTERVAL):
        optimizer.param_groups[0]["lr"] = LR * min(1.0, (step + 1) / (3 * INTERVAL))
        step_once(optimizer, params, 0, 0)
    assert optimizer.switch_step == 4 * INTERVAL + 1


def test_a_rate_that_rises_after_the_switch_is_warned_of_once():
    params = make_params()
    optimizer = OneBitAdam(params, lr=LR, freeze_step=1, block_size=BLOCK)
    step_once(optimizer, params, 0, 0)
    optimizer.param_groups[0]["lr"] = LR / 2
    step_once(optimizer, params, 0, 1)
    optimizer.param_groups[0]["lr"] = LR * 2
    with pytest.warns(RuntimeWarning, match="lr must not rise after the switch"):
        step_once(optimizer, params, 0, 2)
    step_once(optimizer, params, 0, 3)


# --- groups of ranks and of parameters ----------------------------------------------------------


def grid(rank, world):
    """Two data-parallel groups of two, {0, 2} and {1, 3}; one norm of all four."""
    groups = [dist.new_group(members) for members in ([0, 2], [1, 3])]
    params = make_params()
    optimizer = OneBitAdam(
        params,
        lr=LR,
        freeze_step=2,
        block_size=BLOCK,
        group=groups[rank % 2],
        norm_group=dist.group.WORLD,
        clip_norm=1.0,
    )
    norms = []
    for step in range(4):
        step_once(optimizer, params, rank, step)
        norms.append(optimizer.last_step.grad_norm)
    set_gradients(params, gradients(rank, 4))
    if rank == 1:
        params[0].grad[0, 0] = torch.nan
    optimizer.step()
    return [p.detach() for p in params], norms, optimizer.num_skipped


def test_explicit_groups(ranks):
    results = ranks.run(grid)
    for first, second in ((0, 2), (1, 3)):
        for one, two in zip(results[first][0], results[second][0], strict=True):
            assert_same_bits(one, two, "replica")
    assert not torch.equal(results[0][0][0], results[1][0][0])
    assert all(result[1:] == (results[0][1], 1) for result in results)
    # Step 1, in stage 1: both groups' averages make one norm; step 4: all ranks' own gradients.
    for step, is_average in ((0, True), (3, False)):
        squares = 0.0
        for members in ((0, 2), (1, 3)):
            every = [torch.cat([g.view(-1) for g in gradients(r, step)]) for r in members]
            if is_average:
                every = [torch.stack(every).mean(0)] * 2
            squares += sum(g.double().square().sum().item() for g in every) / 2
        assert abs(results[0][1][step] - squares**0.5) <= 1e-6 * squares**0.5


def uncompressed_group(rank, world, freeze_step):
    params = make_params()
    optimizer = OneBitAdam(
        [{"params": params[:2]}, {"params": params[2:], "compress": False}],
        lr=LR,
        freeze_step=freeze_step,
        block_size=BLOCK,
    )
    for step in range(6):
        step_once(optimizer, params, rank, step)
    return [p.detach() for p in params], optimizer.last_step.bytes_sent


def test_a_group_that_is_not_compressed_goes_on_with_adamw(ranks):
    frozen, never = (ranks.run(uncompressed_group, step, ranks=2)[0] for step in (2, 99))
    for index in (2, 3):
        assert_same_bits(frozen[0][index], never[0][index])
    assert not torch.equal(frozen[0][0], never[0][0])
    assert frozen[1] < never[1]


def test_groups_of_different_betas_are_buckets_of_their_own():
    params = make_params()
    groups = [{"params": params[:2], "betas": (0.8, 0.99)}, {"params": params[2:]}]
    optimizer = OneBitAdam(groups, lr=LR, freeze_step=1, block_size=BLOCK)
    alone = make_params()
    single = OneBitAdam(alone[:2], lr=LR, betas=(0.8, 0.99), freeze_step=1, block_size=BLOCK)
    assert len(optimizer.buckets) == 2
    for step in range(4):
        step_once(optimizer, params, 0, step)
        set_gradients(alone, gradients(0, step))
        single.step()
    for param, wanted in zip(params[:2], alone[:2], strict=True):
        assert_same_bits(param.detach(), wanted.detach())


# --- DDP ----------------------------------------------------------------------------------------


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(20, 30)
        self.second = torch.nn.Linear(30, 5)
        with torch.no_grad():
            for index, param in enumerate(self.parameters()):
                param.copy_(0.3 * make_gradient(param.numel(), seed=index).view_as(param))

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def train_net(rank, world, is_ddp):
    net = Net()
    groups = [
        {"params": net.first.parameters()},
        {"params": net.second.parameters(), "compress": False},
    ]
    optimizer = OneBitAdam(groups, lr=LR, freeze_step=3, block_size=BLOCK, clip_norm=1.0)
    model = net
    if is_ddp:
        model = DistributedDataParallel(net, bucket_cap_mb=0.001)
        optimizer.attach(model)
    for step in range(8):
        optimizer.zero_grad()
        x = make_gradient(8 * 20, seed=100 * step + rank).view(8, 20)
        model(x).square().sum().backward()
        optimizer.step()
    return [p.detach().clone() for p in net.parameters()], optimizer.last_step


def test_ddp_averages_in_stage_1_and_keeps_out_of_stage_2(ranks):
    alone, with_ddp = ranks.run(train_net, False, ranks=2), ranks.run(train_net, True, ranks=2)
    assert with_ddp[0][1].phase == "onebit"
    for (params, report), (wanted, _) in zip(with_ddp, alone, strict=True):
        assert report == with_ddp[0][1]
        for param, expected, replica in zip(params, wanted, with_ddp[0][0], strict=True):
            assert_same_bits(param, replica, "replica")
            torch.testing.assert_close(param, expected, rtol=0, atol=1e-3 * LR)


def test_ddp_of_other_ranks_is_refused(ranks):
    with pytest.raises(AssertionError, match="ddp must average over the ranks of group"):
        ranks.run(attach_in_pairs, ranks=4)


def attach_in_pairs(rank, world):
    group = dist.new_group([0, 1]), dist.new_group([2, 3])
    optimizer = OneBitAdam(Net().parameters(), group=group[rank // 2])
    optimizer.attach(DistributedDataParallel(Net()))


# --- 16 bits ------------------------------------------------------------------------------------


def sixteen_bits(rank, world, zero):
    """bfloat16 parameters beside float32 ones that get the same gradients."""
    params = [torch.nn.Parameter(p.detach().to(torch.bfloat16)) for p in make_params()]
    wide = [torch.nn.Parameter(p.detach().float()) for p in params]
    settings = {"lr": 1e-4, "freeze_step": 3, "block_size": BLOCK, "zero": zero}
    narrow_optimizer = OneBitAdam(params, **settings)
    wide_optimizer = OneBitAdam(wide, **settings)
    for step in range(8):
        grads = [g.to(torch.bfloat16) for g in gradients(rank, step)]
        set_gradients(params, grads)
        set_gradients(wide, [g.float() for g in grads])
        narrow_optimizer.step()
        wide_optimizer.step()
    return [p.detach() for p in params], [p.detach() for p in wide]


@pytest.mark.parametrize("zero", (0, 1))
def test_sixteen_bit_parameters_have_master_weights(ranks, zero):
    """Steps far below a bfloat16's precision still add up: parameters are the masters, rounded."""
    for narrow, wide in ranks.run(sixteen_bits, zero, ranks=2):
        for param, master in zip(narrow, wide, strict=True):
            assert_same_bits(param, master.to(torch.bfloat16))


def scaled(rank, world, overflows):
    params, plain = make_params(), make_params()
    optimizer = OneBitAdam(params, lr=LR, freeze_step=1, block_size=BLOCK)
    unscaled = OneBitAdam(plain, lr=LR, freeze_step=1, block_size=BLOCK)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(4):
        is_bad = overflows and step == 2
        set_gradients(params, [g * 1024 for g in gradients(rank, step)])
        if is_bad and rank == 1:
            params[0].grad.fill_(torch.inf)
        scaler.scale(torch.ones(()))
        scaler.step(optimizer)
        scaler.update(1024.0)
        if not is_bad:
            set_gradients(plain, gradients(rank, step))
            unscaled.step()
    return [p.detach() for p in params], [p.detach() for p in plain], optimizer.num_skipped


@pytest.mark.parametrize("overflows", (False, True))
def test_gradient_scaler(ranks, overflows):
    """A factor of 1024 rounds nothing; an overflow on rank 1 skips the step on both."""
    for params, plain, num_skipped in ranks.run(scaled, overflows, ranks=2):
        assert num_skipped == overflows
        for param, wanted in zip(params, plain, strict=True):
            assert_same_bits(param, wanted)


# --- bytes --------------------------------------------------------------------------------------


def report(rank, world, zero):
    params = [torch.nn.Parameter(make_gradient(world * 1024 * 50))]
    optimizer = OneBitAdam(params, lr=LR, freeze_step=1, zero=zero)
    reports = []
    for step in range(3):
        params[0].grad = make_gradient(params[0].numel(), seed=step + 10 * rank)
        optimizer.step()
        reports.append(optimizer.last_step)
    state = optimizer.state_dict()["buckets"][0]["tensors"]
    return reports, sum(t.nbytes for t in state.values()) / params[0].numel()


@pytest.mark.parametrize("world", (2, 4))
def test_bytes_sent_and_bytes_of_state(ranks, world):
    numel = world * 1024 * 50
    for (adam, _, onebit), bytes_a_param in ranks.run(report, 0, ranks=world):
        plain = uncompressed_bytes(numel, world)
        assert (adam.phase, adam.bytes_sent) == ("adam", plain)
        assert (onebit.phase, onebit.bytes_sent) == ("onebit", wire_bytes(numel, world, ONEBIT))
        assert 31 * onebit.bytes_sent <= onebit.uncompressed_bytes == plain
        assert bytes_a_param <= 6.3 + 4 / world
    for (_, _, onebit), bytes_a_param in ranks.run(report, 1, ranks=world):
        # Parameters travel from their owners once; master weights and server error are theirs.
        assert onebit.bytes_sent == wire_bytes(numel, world, ONEBIT) + 4 * numel // world * (
            world - 1
        )
        assert bytes_a_param <= 6.3 + 8 / world


# --- messages -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, message",
    [
        ({"zero": 2}, "zero must be 0 or 1, got 2; .*fsdp_hooks"),
        ({"zero": 3}, "ZeRO-2/3"),
        ({"freeze_step": 0}, "freeze_step must be auto or at least 1, got 0"),
        ({"freeze_step": "soon"}, "freeze_step must be auto or at least 1, got 'soon'"),
        ({"clip_norm": float("nan")}, "clip_norm must be finite and >= 0, got nan"),
        ({"grads": "mine"}, "grads must be local or averaged, got 'mine'"),
        ({"variance_floor": 2.0}, "variance_floor must be in"),
        ({"betas": (1.0, 0.9)}, "betas must be in"),
        ({"lr": -1.0}, "lr, eps and weight_decay must be >= 0"),
        ({"block_size": 12}, "block_size must be a positive multiple of 8"),
    ],
)
def test_messages(options, message):
    with pytest.raises(ValueError, match=message):
        OneBitAdam(make_params(), **options)


def test_float64_cannot_switch():
    params = make_params(dtype=torch.float64)
    optimizer = OneBitAdam(params, freeze_step=1)
    set_gradients(params, gradients(0, 0, dtype=torch.float64))
    with pytest.raises(TypeError, match="keep freeze_step above the number of steps"):
        optimizer.step()


def test_a_sharded_parameter_is_refused(ranks):
    with pytest.raises(AssertionError, match="params must be plain tensors, got a DTensor"):
        ranks.run(over_dtensor, ranks=2)


def over_dtensor(rank, world):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world,))
    OneBitAdam([torch.nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))])


# --- groups that come later, gradients that do not fit -------------------------------------------


def train_in_groups(rank, world, later):
    """Parameters after the switch, their second half in a group of the constructor or added."""
    params = make_params()
    half = len(params) // 2
    groups = [{"params": params[:half]}, {"params": params[half:], "lr": LR / 2}]
    settings = {"lr": LR, "betas": BETAS, "block_size": BLOCK, "freeze_step": 3}
    optimizer = OneBitAdam(groups[:1] if later else groups, **settings)
    if later:
        optimizer.add_param_group(groups[1])
    for step in range(6):
        step_once(optimizer, params, rank, step)
    return [p.detach() for p in params]


def test_added_group_trains_like_one_of_the_constructor(ranks):
    added = ranks.run(train_in_groups, True, ranks=2)
    given = ranks.run(train_in_groups, False, ranks=2)
    for ours, theirs in zip(added[0] + added[1], given[0] + given[1], strict=True):
        assert_same_bits(ours, theirs)


def test_group_is_refused_after_a_step_and_where_it_breaks_a_rule():
    params, more = make_params(), torch.nn.Parameter(torch.ones(3))
    optimizer = OneBitAdam(params, block_size=BLOCK)
    with pytest.raises(ValueError, match="betas must be in"):
        optimizer.add_param_group({"params": [more], "betas": (1.0, 0.9)})
    assert len(optimizer.param_groups) == 1
    step_once(optimizer, params, 0, 0)
    with pytest.raises(ValueError, match="add_param_group must come before the first step"):
        optimizer.add_param_group({"params": [more]})


def test_sparse_gradients_and_nan_rates_are_refused():
    table = torch.nn.Embedding(10, 4, sparse=True)
    optimizer = OneBitAdam(table.named_parameters(), block_size=BLOCK)
    table(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(TypeError, match="gradients must be dense, got a sparse one of weight"):
        optimizer.step()
    with pytest.raises(ValueError, match="lr, eps and weight_decay must be >= 0, got nan"):
        OneBitAdam(make_params(), lr=float("nan"))
