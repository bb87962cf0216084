"""What autograd saves in fewer bits: the bound of each format, and what is left alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import cross_entropy

from mcp_kernels import flash_attn_func
from mcp_kernels.saved import is_exact, keep_exact
from mcp_kernels.testing import make_gradient
from mcp_parallel.config import Config, ModelConfig
from mcp_parallel.layout import Layout
from mcp_parallel.model.formats import BLOCK_SIZE
from mcp_parallel.model.packing import SMALLEST, Packer
from mcp_parallel.model.remat import Remat, recomputable
from mcp_parallel.parallel.mesh import build_mesh
from mcp_parallel.parallel.parallelize import build_stages

pytestmark = pytest.mark.usefixtures("poisoned_memory")
FORMATS = ["bf16", "int8", "fp8"]
CONFIG = ModelConfig(
    num_layers=2,
    hidden_size=64,
    num_heads=4,
    num_kv_heads=2,
    ffn_size=96,
    vocab_size=64,
    seq_len=48,
)


def bound(x, compression):
    """Most that each element may lose: half a step of its format, exact in float64."""
    x = x.double().flatten()
    blocks = torch.nn.functional.pad(x, (0, -len(x) % BLOCK_SIZE)).view(-1, BLOCK_SIZE)
    largest = blocks.abs().amax(1).repeat_interleave(BLOCK_SIZE)[: len(x)]
    # Dividing by the scale and multiplying by it again round to float32, three times 2^-24.
    rounding = 2**-22 * largest
    if compression == "bf16":
        return 2**-8 * x.abs()
    if compression == "int8":
        return largest / 254 + rounding
    return torch.maximum(2**-4 * x.abs(), 2**-10 * largest / 448) + rounding


def packed(tensor, compression, parameters=()):
    packer = Packer(compression, parameters)
    saved = packer.pack(tensor)
    return saved, packer.unpack(saved)


@pytest.mark.parametrize("compression", FORMATS)
@pytest.mark.parametrize("numel", [SMALLEST, 1025, 5003])
def test_no_element_loses_more_than_its_format_says(compression, numel):
    x = make_gradient(numel, seed=numel)
    saved, back = packed(x, compression)
    assert saved is not x
    assert back.dtype == x.dtype
    lost = (back.double() - x.double()).abs()
    limit = bound(x, compression)
    assert (lost <= limit).all(), (lost / limit).max()
    # The bound is met, not merely kept: a format twice as fine would not come near it.
    assert (lost / limit).max() > 0.8


@pytest.mark.parametrize("compression", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_come_back_as_they_were(compression, dtype):
    x = make_gradient(4096).to(dtype)
    saved, back = packed(x, compression)
    assert back.dtype == dtype
    if dtype == torch.bfloat16 and compression == "bf16":
        assert saved is x
        return
    # To bfloat16 the result is rounded once more.
    again = 2**-8 * x.double().abs() if dtype == torch.bfloat16 else 0.0
    assert ((back.double() - x.double()).abs() <= bound(x, compression) + again).all()


@pytest.mark.parametrize("compression", FORMATS)
def test_a_value_that_is_not_finite_does_not_turn_into_a_number(compression):
    x = make_gradient(2048)
    x[5] = float("nan")
    back = packed(x, compression)[1]
    assert back[5].isnan()
    assert back[BLOCK_SIZE:].isfinite().all()


@pytest.mark.parametrize("compression", FORMATS)
def test_views_keep_their_place_in_memory(compression):
    base = make_gradient(48 * 64).view(48, 64)
    for view in (base.t(), base[8:40], base[:, ::2], base.view(6, 8, 64).transpose(0, 1)):
        back = packed(view, compression)[1]
        assert back.shape == view.shape
        # Every 256 elements have a scale of their own: the whole tensor's largest bounds them all.
        assert (back - view).abs().max() <= bound(base, compression).max()


def test_what_stays_as_it_is():
    weight = torch.nn.Parameter(make_gradient(4096).view(64, 64))
    statistic, stage_input = make_gradient(4096), make_gradient(4096).requires_grad_()
    keep_exact(statistic)
    for tensor in (
        weight,
        weight.t(),
        weight.detach()[:32],
        statistic.view(64, 64),
        stage_input,
        torch.arange(4096),
        make_gradient(SMALLEST - 1),
    ):
        kept = packed(tensor, "int8", [weight])[0]
        assert isinstance(kept, torch.Tensor)
        assert kept.data_ptr() == tensor.data_ptr()
    assert packed(weight.detach() * 1, "int8", [weight])[0] is not weight


def test_log_sum_exps_and_norm_scales_are_exact_and_attention_outputs_are_not():
    seen = []
    q = make_gradient(2 * 64 * 4 * 16).view(2, 64, 4, 16).requires_grad_()
    with saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t):
        flash_attn_func(q, q * 1, q * 1, causal=True)
    exact = [t for t in seen if is_exact(t)]
    assert [tuple(t.shape) for t in exact] == [(2, 4, 64)]
    assert sum(tuple(t.shape) == (2, 64, 4, 16) for t in seen) == 4


def test_statistics_of_a_layer_norm_are_exact():
    """One number a row each: less than a hundredth of what it is there to scale."""
    packer, seen = Packer("int8", ()), []

    def pack(tensor):
        seen.append((tensor, packer.unpack(packer.pack(tensor))))
        return tensor

    x = make_gradient(2 * SMALLEST * 16, seed=3).view(-1, 16).requires_grad_()
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        torch.nn.functional.layer_norm(x * 1.5, (16,))
    statistics = [(a, b) for a, b in seen if a.shape[-1] == 1]
    assert len(statistics) == 2
    assert all(torch.equal(a, b) for a, b in statistics)
    assert any(not torch.equal(a, b) for a, b in seen)


@pytest.mark.parametrize("compression", ["none", *FORMATS])
def test_host_memory_changes_no_bit(compression):
    x = make_gradient(5003)
    here, there = (Packer(compression, (), to_host=host) for host in (False, True))
    saved = there.pack(x)
    assert saved is not x
    assert torch.equal(there.unpack(saved), here.unpack(here.pack(x)))
    x.zero_()
    assert there.unpack(saved).any()  # a copy, not the memory itself


def test_a_tensor_saved_by_several_operations_is_packed_once():
    x = make_gradient(4096).view(64, 64).requires_grad_() * 1
    views = []

    class Counting(Packer):
        def pack(self, tensor):
            views.append(super().pack(tensor))
            return views[-1]

    packer = Counting("int8", ())
    with saved_tensors_hooks(packer.pack, packer.unpack):
        y = x.exp().sum() + x.sin().sum() + x.view(-1).cos().sum() + x.t().square().sum()
    kept = {id(view.kept) for view in views if view.kept.make().shape == (4096,)}
    # x under sin, cos and square; exp saves its own result.
    assert len(views) == 4
    assert len(kept) == 2
    y.backward()


def test_a_write_between_two_saves_is_seen():
    x, packer = make_gradient(4096), Packer("int8", ())
    first = packer.pack(x)
    x.zero_()
    second = packer.pack(x)
    assert packer.unpack(first).abs().max() > 0
    assert packer.unpack(second).abs().max() == 0


def test_memory_that_was_freed_is_not_taken_for_what_came_before():
    packer = Packer("int8", ())
    saved = []
    for seed in range(20):  # the allocator gives the same addresses again
        x = make_gradient(1 << 16, seed=seed)
        saved.append((packer.pack(x), x.sum()))
        del x
    sums = [packer.unpack(view).sum() for view, _ in saved]
    for got, (_, want) in zip(sums, saved, strict=True):
        assert abs(got - want) <= bound(make_gradient(1 << 16), "int8").sum()
    assert len({float(s) for s in sums}) == 20


def test_a_recipe_runs_again_with_the_same_bits_and_keeps_only_its_inputs():
    runs = []

    def cheap(a, b):
        runs.append(1)
        return a.sin() * b

    def block(x, w):
        # Under hooks, so that only what is made from kept inputs counts.
        return recomputable(cheap, x, w * 2) @ w

    x, w = (make_gradient(4096, seed=s).view(64, 64).requires_grad_() for s in (1, 2))
    want = torch.autograd.grad(block(x, w).square().sum(), (x, w))
    assert len(runs) == 1
    loss = Remat("selective")(lambda t: block(t, w), x, [w]).square().sum()
    assert len(runs) == 2
    got = torch.autograd.grad(loss, (x, w))
    assert len(runs) == 3
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def gradients(policy, compression, seed=0):
    base = Config()
    memory = replace(
        base.memory, activation_checkpointing=policy, activation_compression=compression
    )
    run = replace(base, model=CONFIG, memory=memory)
    model = build_stages(run, build_mesh(Layout(), torch.device("cpu")))[0].model
    tokens = torch.randint(64, (2, 48), generator=torch.Generator().manual_seed(seed))
    loss = cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    return loss, torch.autograd.grad(loss, list(model.parameters()))


@pytest.mark.parametrize("policy", ["none", "selective", "full"])
@pytest.mark.parametrize("compression", FORMATS)
def test_forward_keeps_its_bits_and_gradients_are_near(policy, compression):
    loss, grads = gradients("none", "none")
    got_loss, got_grads = gradients(policy, compression)
    assert torch.equal(got_loss, loss)
    # Relative in norm: each saved factor is off by at most its format's step, a gradient is
    # bilinear in them, and rounding errors of many elements add up at random.
    step = {"bf16": 2**-8, "int8": 1 / 127, "fp8": 2**-4}[compression]
    off = [(a - b).norm() / b.norm() for a, b in zip(got_grads, grads, strict=True)]
    assert max(off) <= 2 * step, (policy, max(off) / step)
    assert max(off) > step / 100  # something was packed


@pytest.mark.parametrize("compression", ["none", "int8"])
def test_selective_keeps_the_gradient_of_none(compression):
    for a, b in zip(
        gradients("none", compression)[1], gradients("selective", compression)[1], strict=True
    ):
        if compression == "none":
            assert torch.equal(a, b)
        else:  # norms of packed inputs instead of packed norms: as near as each is to the truth
            assert (a - b).norm() <= 2 / 127 * a.norm()
