"""The parts of torch that train in parallel, on the backend "shm"."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

pytest.importorskip("mcp_kernels._shm", reason="the _shm extension was not built")

from mcp_kernels.shm import ShmProcessGroup


def shm_group(world):
    return dist.new_group(list(range(world)), backend="shm")


class as_default:  # noqa: N801 (reads as a statement)
    """Inside, the default group is one of backend "shm", as init_process_group would make it."""

    def __init__(self, world):
        self.group = shm_group(world)

    def __enter__(self):
        self.usual = dist.group.WORLD
        dist.distributed_c10d._update_default_pg(self.group)
        return self.group

    def __exit__(self, *exc_info):
        dist.distributed_c10d._update_default_pg(self.usual)


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)
    )


def batch(rows):
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(1))[rows]


def reference_gradients():
    model = make_model()
    model(batch(slice(None))).square().mean().backward()
    return [p.grad for p in model.parameters()]


def check_gradients(grads):
    for grad, exact in zip(grads, reference_gradients(), strict=True):
        torch.testing.assert_close(grad, exact, rtol=1e-5, atol=1e-7)


def rows_of(rank, world):
    return slice(rank * 8 // world, (rank + 1) * 8 // world)


def _ddp(rank, world):
    group = shm_group(world)
    model = nn.parallel.DistributedDataParallel(
        make_model(), process_group=group, bucket_cap_mb=0.001
    )
    for _ in range(2):
        model.zero_grad()
        model(batch(rows_of(rank, world))).square().mean().backward()
    check_gradients([p.grad for p in model.parameters()])


def test_ddp(ranks):
    ranks.run(_ddp, ranks=2)


def _fsdp(rank, world):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    with as_default(world):
        mesh = init_device_mesh("cpu", (world,))
        assert isinstance(mesh.get_group(), ShmProcessGroup)
        model = make_model()
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        model(batch(rows_of(rank, world))).square().mean().backward()
        check_gradients([p.grad.full_tensor() for p in model.parameters()])


def test_fsdp2(ranks):
    ranks.run(_fsdp, ranks=2)


def _dtensor(rank, world):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    with as_default(world):
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "tp"))
        model = make_model()
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(model, mesh["tp"], plan)
        model(batch(slice(None))).square().mean().backward()
        check_gradients(
            [
                p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
                for p in model.parameters()
            ]
        )


def test_dtensor_tensor_parallel(ranks):
    ranks.run(_dtensor)


def _pipeline(rank, world, name):
    from torch.distributed import pipelining

    stages_each = 2 if "Interleaved" in name else 1
    num_stages = world * stages_each
    group = shm_group(world)
    torch.manual_seed(0)
    layers = [nn.Linear(6, 6).double() for _ in range(num_stages)]
    x = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    whole = nn.Sequential(*layers)
    exact = whole(x)
    exact.square().sum().backward()
    expected = [layer.weight.grad.clone() for layer in layers]
    whole.zero_grad()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about its own calls
        mine = [rank + world * k for k in range(stages_each)]
        stages = [
            pipelining.PipelineStage(layers[i], i, num_stages, torch.device("cpu"), group=group)
            for i in mine
        ]
        schedule = getattr(pipelining, name)(
            stages if stages_each > 1 else stages[0],
            n_microbatches=4,
            loss_fn=lambda y, target: y.square().sum(),
            scale_grads=False,
        )
        for _ in range(2):
            whole.zero_grad()
            if rank == 0:
                schedule.step(x, target=torch.zeros(8, 6))
            else:
                schedule.step(target=torch.zeros(8, 6))
    for i in mine:
        torch.testing.assert_close(layers[i].weight.grad, expected[i], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", ["ScheduleGPipe", "Schedule1F1B", "ScheduleInterleaved1F1B"])
@pytest.mark.parametrize("world", [2, 4])
def test_pipelines(ranks, name, world):
    ranks.run(_pipeline, name, ranks=world)


def _checkpoint(rank, world, folder):
    import torch.distributed.checkpoint as dcp

    with as_default(world) as group:
        state = {"x": torch.arange(10) + rank, "shared": torch.ones(3)}
        dcp.save(
            {f"rank{rank}": state["x"], "shared": state["shared"]},
            checkpoint_id=folder,
            process_group=group,
        )
        loaded = {f"rank{(rank + 1) % world}": torch.zeros(10, dtype=torch.int64)}
        dcp.load(loaded, checkpoint_id=folder, process_group=group)
        assert torch.equal(
            loaded[f"rank{(rank + 1) % world}"], torch.arange(10) + (rank + 1) % world
        )


def test_distributed_checkpoint(ranks, tmp_path):
    ranks.run(_checkpoint, str(tmp_path), ranks=2)


def _sub_groups(rank, world):
    with as_default(world):
        total = 0.0
        for members in ([0, 1], [2, 3], [0, 2], [1, 3], [3, 0, 1]):
            group = dist.new_group(members)
            if rank in members:
                x = torch.tensor([float(rank)])
                dist.all_reduce(x, group=group)
                assert x.item() == sum(members)
                total += x.item()
        return total


def test_sub_groups(ranks):
    assert ranks.run(_sub_groups) == [1 + 2 + 4, 1 + 4 + 4, 5 + 2, 5 + 4 + 4]


def _hooks(rank, world):
    """All-reduces started from backward hooks, waited for afterwards, on autograd's own thread."""
    group = shm_group(world)
    model = make_model()
    works = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda p: works.append(
                dist.all_reduce(p.grad, dist.ReduceOp.AVG, group=group, async_op=True)
            )
        )
    model(batch(rows_of(rank, world))).square().mean().backward()
    for work in works:
        work.wait()
    check_gradients([p.grad for p in model.parameters()])


def test_all_reduce_from_hooks(ranks):
    ranks.run(_hooks, ranks=2)
