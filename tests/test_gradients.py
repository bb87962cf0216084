"""Flat gradient buckets: sums over ranks, whatever arrives when, nothing left of the last step."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from mcp_parallel.parallel import gradients
from mcp_parallel.parallel.gradients import GradientBuckets, _fill_buckets

SHAPES = [(3, 4), (5,), (2, 2, 2), (1,), (7, 3)]


def make_parameters():
    return [nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for shape in SHAPES]


def loss_of(parameters, used, weight):
    return sum(((i + 1) * weight * parameters[i]).sum() for i in used)


def run(rank, world, used_by_rank, microbatches, is_armed, bucket_bytes):
    parameters = make_parameters()
    with mock.patch.object(gradients, "BUCKET_BYTES", bucket_bytes):  # ranks serve other tests too
        buckets = GradientBuckets(parameters, dist.group.WORLD)
    steps = []
    for step in range(2):
        buckets.zero()
        for microbatch in range(microbatches):
            if is_armed and microbatch == microbatches - 1:
                buckets.arm()
            loss_of(parameters, used_by_rank[rank], 10.0 * step + rank + 1).backward()
        buckets.finish()
        steps.append([p.grad.clone() for p in parameters])
    views = {p.grad.untyped_storage().data_ptr() for p in parameters}
    return steps, len(views)


@pytest.mark.parametrize("bucket_bytes, num_buckets", [(1 << 20, 1), (100, 4), (1, 5)])
@pytest.mark.parametrize("microbatches, is_armed", [(1, True), (3, True), (2, False)])
@pytest.mark.parametrize(
    "used_by_rank",
    [[range(5), range(5)], [[0, 2, 4], range(5)], [range(5), [0]]],
    ids=["all", "some", "one"],
)
def test_sums_over_ranks(ranks, bucket_bytes, num_buckets, microbatches, is_armed, used_by_rank):
    results = ranks.run(run, used_by_rank, microbatches, is_armed, bucket_bytes, ranks=2)
    for steps, views in results:
        assert views == num_buckets
        for step, grads in enumerate(steps):
            for i, grad in enumerate(grads):
                expected = sum(
                    (i + 1) * (10.0 * step + rank + 1) * microbatches
                    for rank, used in enumerate(used_by_rank)
                    if i in used
                )
                assert torch.equal(grad, torch.full(SHAPES[i], expected, dtype=torch.float64))


def test_buckets_keep_order_and_respect_their_size(monkeypatch):
    monkeypatch.setattr(gradients, "BUCKET_BYTES", 100)
    parameters = make_parameters()  # 96, 40, 64, 8 and 168 bytes
    buckets = _fill_buckets(parameters)
    assert [[p.numel() * 8 for p in bucket] for bucket in buckets] == [[96], [40], [64, 8], [168]]
    assert [p for bucket in buckets for p in bucket] == parameters
    assert _fill_buckets([]) == []
