"""The model cut over ranks: what each holds, its initial values, and the loss over cut logits."""

from dataclasses import asdict, replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy

from mcp_parallel.config import Config, ModelConfig, ParallelConfig
from mcp_parallel.layout import Layout, split_dim
from mcp_parallel.model.init import fill_shard, parameter_std
from mcp_parallel.model.loss import IGNORED
from mcp_parallel.parallel.mesh import build_mesh
from mcp_parallel.parallel.parallelize import build_stages, global_shapes
from mcp_parallel.parallel.tensor import vocab_parallel_loss

BATCH, LENGTH = 2, 12


def make(vocab, seed=0):
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(vocab, (BATCH, LENGTH), generator=generator)
    targets[0, 0], targets[0, 1] = 0, vocab - 1
    logits = 3 * torch.randn(BATCH, LENGTH, vocab, generator=generator, dtype=torch.float64)
    return targets, logits


def part(tensor, dim, rank, world):
    start, length = split_dim(tensor.shape[dim], world, rank)
    return tensor.narrow(dim, start, length).clone().requires_grad_()


def run_loss(rank, world, vocab, ignored, scale):
    targets, logits = make(vocab)
    targets.view(-1)[ignored] = IGNORED
    mine = part(logits * scale, 2, rank, world)
    start, _ = split_dim(vocab, world, rank)
    loss = vocab_parallel_loss(mine, targets, vocab_start=start, group=dist.group.WORLD)
    (loss / 7).backward()
    return loss.detach(), mine.grad


@pytest.mark.parametrize("world, vocab", [(2, 37), (4, 37), (4, 6)])
@pytest.mark.parametrize(
    "ignored, scale", [([], 1.0), ([0, 5, 23], 1.0), (list(range(24)), 1.0), ([3], 1e4)]
)
def test_loss(ranks, world, vocab, ignored, scale):
    results = ranks.run(run_loss, vocab, ignored, scale, ranks=world)
    targets, logits = make(vocab)
    targets.view(-1)[ignored] = IGNORED
    logits = (logits * scale).requires_grad_()
    expected = cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    (expected / 7).backward()
    for loss, _ in results:
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-13, atol=1e-12)
    grad = torch.cat([grad for _, grad in results], dim=2)
    torch.testing.assert_close(grad, logits.grad, rtol=1e-12, atol=1e-15)


# An odd vocabulary and feed-forward: tensor parallelism cuts both unevenly, and fully_shard cuts
# what is left unevenly again.
MODEL = ModelConfig(
    preset=None,
    num_layers=2,
    hidden_size=12,
    num_heads=2,
    num_kv_heads=2,
    ffn_size=9,
    vocab_size=37,
    seq_len=8,
    tie_embeddings=True,
)


def hold(rank, world, layout):
    """What this rank holds of the model: places, values, and whether it counts."""
    base = Config()
    config = replace(
        base,
        model=MODEL,
        parallel=ParallelConfig(**asdict(layout)),
        train=replace(base.train, precision="fp64"),
    )
    stages = build_stages(config, build_mesh(layout, torch.device("cpu")))
    shards = [shard for stage in stages for shard in stage.shards]
    if layout.tp > 1:
        assert all(isinstance(shard.parameter, DTensor) for shard in shards)
    return [
        (s.name, s.global_shape, s.offsets, s.local, s.counted_here, s.grad_partial_over_tp)
        for s in shards
    ]


@pytest.mark.parametrize(
    "layout",
    [
        Layout(tp=2),
        Layout(tp=2, sequence_parallel=False),
        Layout(dp=2, zero=3),
        Layout(dp=2, tp=2),
        Layout(dp=2, tp=2, zero=1),
        Layout(tp=2, pp=2),
    ],
    ids=str,
)
def test_ranks_hold_the_whole_model_and_count_each_element_once(ranks, layout):
    counted = {name: torch.zeros(shape) for name, shape in global_shapes(MODEL).items()}
    for held in ranks.run(hold, layout, ranks=layout.world_size):
        for name, shape, offsets, local, is_counted, is_partial in held:
            assert shape == tuple(counted[name].shape)
            expected = torch.empty_like(local)
            std = parameter_std(name, MODEL)
            fill_shard(expected, name, shape, offsets, seed=Config().train.seed, std=std)
            assert torch.equal(local, expected), (name, offsets)
            box = tuple(slice(o, o + n) for o, n in zip(offsets, local.shape, strict=True))
            counted[name][box] += is_counted
            is_norm = name.endswith("norm.weight")
            assert is_partial == (is_norm and layout.tp > 1 and layout.sequence_parallel)
    for name, times in counted.items():
        assert torch.equal(times, torch.ones_like(times)), name
