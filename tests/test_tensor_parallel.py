"""Vocabulary-parallel embedding and loss against the whole table on one rank."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy, embedding

from mcp_parallel.layout import split_dim
from mcp_parallel.model.region import IGNORED
from mcp_parallel.parallel.tensor import TensorRegion, split_dim_of

BATCH, LENGTH, HIDDEN = 2, 12, 6


def make(vocab, seed=0):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocab, (BATCH, LENGTH), generator=generator)
    tokens[0, 0], tokens[0, 1] = 0, vocab - 1
    table = torch.randn(vocab, HIDDEN, generator=generator, dtype=torch.float64)
    logits = 3 * torch.randn(BATCH, LENGTH, vocab, generator=generator, dtype=torch.float64)
    return tokens, table, logits


def part(tensor, dim, rank, world):
    start, length = split_dim(tensor.shape[dim], world, rank)
    return tensor.narrow(dim, start, length).clone().requires_grad_()


def run_embedding(rank, world, vocab, sequence_parallel):
    region = TensorRegion(dist.group.WORLD, vocab, sequence_parallel=sequence_parallel)
    tokens, table, _ = make(vocab)
    mine = part(table, 0, rank, world)
    out = region.embed(tokens, mine)
    weight = torch.arange(BATCH * LENGTH * HIDDEN, dtype=torch.float64).view(BATCH, LENGTH, HIDDEN)
    share = part(weight, 1, rank, world).detach() if sequence_parallel else weight
    (out * share).sum().backward()
    return out.detach(), mine.grad


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("world, vocab", [(2, 37), (4, 37), (4, 5), (3, 9)])
def test_embedding(ranks, world, vocab, sequence_parallel):
    results = ranks.run(run_embedding, vocab, sequence_parallel, ranks=world)
    tokens, table, _ = make(vocab)
    table.requires_grad_()
    expected = embedding(tokens, table)
    weight = torch.arange(expected.numel(), dtype=torch.float64).view_as(expected)
    (expected * weight).sum().backward()
    outs, grads = zip(*results, strict=True)
    assert torch.equal(torch.cat(grads), table.grad)
    for rank, out in enumerate(outs):
        want = part(expected.detach(), 1, rank, world) if sequence_parallel else expected
        assert torch.equal(out, want)


def run_loss(rank, world, vocab, ignored, scale):
    region = TensorRegion(dist.group.WORLD, vocab, sequence_parallel=True)
    targets, _, logits = make(vocab)
    targets.view(-1)[ignored] = IGNORED
    mine = part(logits * scale, 2, rank, world)
    loss = region.cross_entropy(mine, targets)
    (loss / 7).backward()
    return loss.detach(), mine.grad


@pytest.mark.parametrize("world, vocab", [(2, 37), (4, 37), (4, 6)])
@pytest.mark.parametrize(
    "ignored, scale", [([], 1.0), ([0, 5, 23], 1.0), (list(range(24)), 1.0), ([3], 1e4)]
)
def test_loss(ranks, world, vocab, ignored, scale):
    results = ranks.run(run_loss, vocab, ignored, scale, ranks=world)
    targets, _, logits = make(vocab)
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


def test_every_weight_of_the_model_has_a_stated_split():
    from mcp_parallel.config import ModelConfig
    from mcp_parallel.parallel.parallelize import global_shapes

    shapes = global_shapes(replace(ModelConfig(), num_layers=1))
    matrices = {name for name, shape in shapes.items() if len(shape) == 2}
    assert {name for name in shapes if split_dim_of(name) is not None} == matrices
