"""Head and loss in one: values and gradients of plain cross-entropy, logits that never exist."""

from __future__ import annotations

import math
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

from mcp_parallel.layout import split_dim
from mcp_parallel.model.loss import IGNORED
from mcp_parallel.parallel import head_loss as module
from mcp_parallel.parallel.head_loss import head_loss

POSITIONS, HIDDEN, VOCAB = (3, 7), 5, 37
ALL_IGNORED = list(range(21))


@pytest.fixture
def small_chunks(monkeypatch):
    """Four rows a chunk: 21 positions are five whole ones and one row; nothing counts as small."""
    monkeypatch.setattr(module, "_SMALL_BYTES", -1)
    monkeypatch.setattr(module, "_MIN_ROWS", {"cpu": 4})
    monkeypatch.setattr(module, "_CHUNK_BYTES", {"cpu": 1})


def make(dtype=torch.float64, ignored=(), spread=1.0, vocab=VOCAB, hidden=HIDDEN):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(*POSITIONS, hidden, generator=generator, dtype=torch.float64).mul_(spread)
    weight = torch.randn(vocab, hidden, generator=generator, dtype=torch.float64)
    targets = torch.randint(vocab, POSITIONS, generator=generator)
    targets.view(-1)[:2] = torch.tensor([0, vocab - 1])
    targets.view(-1)[list(ignored)] = IGNORED
    return x.to(dtype), weight.to(dtype), targets


def gradients(loss, x, weight, upstream=1.0):
    (loss * upstream).backward()
    return loss.detach(), x.grad, weight.grad


def plain(x, weight, targets, scale, upstream=1.0):
    """The definition, in float64 on the values that ``head_loss`` gets."""
    x, weight = (t.detach().double().requires_grad_() for t in (x, weight))
    logits = (x @ weight.t()).flatten(0, -2)
    loss = cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="sum") * scale
    return gradients(loss, x, weight, upstream)


def ours(x, weight, targets, scale, upstream=1.0, **options):
    x, weight = (t.detach().clone().requires_grad_() for t in (x, weight))
    return gradients(head_loss(x, weight, targets, scale=scale, **options), x, weight, upstream)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("upstream", [1.0, -0.3])
@pytest.mark.parametrize("ignored", [[], [0, 5, 20], ALL_IGNORED])
@pytest.mark.parametrize("spread", [1.0, 1e4])
@pytest.mark.usefixtures("small_chunks", "poisoned_memory")
def test_is_cross_entropy(recompute, upstream, ignored, spread):
    x, weight, targets = make(ignored=ignored, spread=spread)
    found = ours(x, weight, targets, 1 / 19, upstream, recompute=recompute)
    expected = plain(x, weight, targets, 1 / 19, upstream)
    # A logit is off by some eps of its size, and a probability by that much of itself.
    off = 1e-14 * max(1.0, (x @ weight.t()).abs().max().item())
    for mine, want in zip(found, expected, strict=True):
        size = want.abs().max().item()
        torch.testing.assert_close(mine, want, rtol=0, atol=10 * off * max(size, 1e-3))


def bounds(x, weight, targets, scale):
    """How far (loss, dx, dW) of the dtype of ``x`` may lie from exact ones.

    Letters: u = rounding of what is stored in x's dtype, e = of float32 or wider arithmetic.
    Logits are off by d = sqrt(D) e |x||W| + u |z|; each probability and each summand of the loss
    then by 2 d and a dozen e of itself, since log-sum-exp moves no more than its inputs. dz is
    stored (u), multiplied by W or x (sqrt of the sum's length times e) and stored again: twice
    where chunks are added, three times with the late scale.
    """
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    e = torch.finfo(wide).eps / 2
    u = 0.0 if x.dtype == wide else torch.finfo(x.dtype).eps / 2
    x, weight = x.double().flatten(0, -2), weight.double()
    z = x @ weight.t()
    d = (math.sqrt(x.shape[1]) * e * (x.abs() @ weight.abs().t()) + u * z.abs()).max().item()
    counted = (targets.flatten() != IGNORED)[:, None]
    one_hot = torch.zeros_like(z).scatter_(1, targets.flatten().clamp(min=0)[:, None], 1)
    dz = (z.softmax(1) + one_hot) * counted * scale
    relative = 2 * d + 12 * e + 4 * u
    loss = scale * (z.logsumexp(1).abs() * 4 * e + 2 * d + 12 * e).sum()
    dx = (relative + math.sqrt(len(weight)) * e) * (dz @ weight.abs())
    dw = (relative + math.sqrt(len(x)) * e) * (dz.t() @ x.abs())
    # float16 has no numbers below this, and p ends there.
    smallest = torch.finfo(x.dtype if u == 0.0 else torch.float16).smallest_normal
    return loss, dx + smallest, dw + smallest


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.usefixtures("small_chunks", "poisoned_memory")
def test_every_dtype_stays_within_its_roundings(dtype, recompute):
    x, weight, targets = make(dtype, ignored=[3, 4], vocab=101, hidden=33)
    scale = 1e-2
    found = ours(x, weight, targets, scale, recompute=recompute)
    exact = plain(x, weight, targets, scale)
    assert found[0].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert found[1].dtype == found[2].dtype == dtype
    for mine, want, bound in zip(found, exact, bounds(x, weight, targets, scale), strict=True):
        excess = (mine.double() - want).abs() - bound.view_as(want)
        assert (excess <= 0).all(), excess.max()


@pytest.mark.usefixtures("small_chunks")
def test_a_small_scale_does_not_lose_float16_gradients():
    """A loss scale undoes one over a million tokens; no gradient may underflow in between."""
    x, weight, targets = make(torch.float16)
    scale = 2.0**-30
    for recompute in (False, True):
        _, dx, dw = ours(x, weight, targets, scale, 1 / scale, recompute=recompute)
        _, dx_plain, dw_plain = ours(x, weight, targets, 1.0)
        assert torch.equal(dx, dx_plain)
        assert torch.equal(dw, dw_plain)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.usefixtures("small_chunks")
def test_gradcheck(recompute):
    x, weight, targets = make(ignored=[2])
    inputs = (x.requires_grad_(), weight.requires_grad_())
    assert torch.autograd.gradcheck(
        lambda a, b: head_loss(a, b, targets, scale=0.1, recompute=recompute), inputs
    )


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.usefixtures("small_chunks")
def test_a_graph_that_is_kept_gives_the_same_again(recompute):
    """Zero-bubble schedules ask for dx first and for dW later."""
    x, weight, targets = make()
    x.requires_grad_(), weight.requires_grad_()
    loss = head_loss(x, weight, targets, scale=0.1, recompute=recompute)
    [dx] = torch.autograd.grad(loss * 3, x, retain_graph=True)
    [dw] = torch.autograd.grad(loss * 3, weight, retain_graph=True)
    (loss * 3).backward()
    torch.testing.assert_close((dx, dw), (x.grad, weight.grad), rtol=0, atol=0)
    expected = plain(x, weight, targets, 0.1, 3.0)[1:]
    torch.testing.assert_close((dx, dw), expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("vocab", [2, 37])
def test_small_logits_take_torchs_own_ops(vocab, monkeypatch):
    x, weight, targets = make(ignored=[0, 5], vocab=vocab)
    found = ours(x, weight, targets, 1 / 19, 0.3)
    expected = plain(x, weight, targets, 1 / 19, 0.3)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-14)
    monkeypatch.setattr(module, "_HeadLoss", None)  # it is not what ran
    ours(x, weight, targets, 1.0)


@pytest.mark.usefixtures("small_chunks")
def test_only_what_is_asked_for():
    x, weight, targets = make()
    expected = plain(x, weight, targets, 1.0)
    head_loss(x.requires_grad_(), weight, targets).backward()
    torch.testing.assert_close(x.grad, expected[1], rtol=1e-12, atol=1e-13)
    with torch.no_grad():
        loss = head_loss(x, weight.requires_grad_(), targets)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, expected[0], rtol=1e-14, atol=0)


@pytest.mark.parametrize("small_bytes", [-1, 4 << 20])
def test_no_position_at_all(monkeypatch, small_bytes):
    monkeypatch.setattr(module, "_SMALL_BYTES", small_bytes)
    x = torch.empty(0, HIDDEN, requires_grad=True)
    weight = torch.ones(VOCAB, HIDDEN, requires_grad=True)
    loss = head_loss(x, weight, torch.empty(0, dtype=torch.int64))
    loss.backward()
    assert loss.item() == 0
    expected = (torch.empty(0, HIDDEN), torch.zeros(VOCAB, HIDDEN))
    torch.testing.assert_close((x.grad, weight.grad), expected)


class Largest(TorchDispatchMode):
    """The most elements that any tensor has which an op gives."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(each, torch.Tensor):
                self.numel = max(self.numel, each.numel())
        return result


@pytest.mark.parametrize("recompute", [False, True])
def test_logits_never_exist(recompute):
    x = torch.randn(1024, 8, requires_grad=True)
    weight = torch.randn(40_000, 8, requires_grad=True)
    with Largest() as seen:
        head_loss(x, weight, torch.zeros(1024, dtype=torch.int64), recompute=recompute).backward()
    # 128 rows at least, so that the weight is not read too often.
    assert seen.numel == 128 * 40_000


def test_arguments_that_do_not_fit_are_refused():
    x, weight, targets = make()
    with pytest.raises(ValueError, match=r"x must be \[\.\.\., D\]"):
        head_loss(x, weight, targets[:1])
    with pytest.raises(ValueError, match=r"\[37, 4\]"):
        head_loss(x, weight[:, :4], targets)


def on_a_rank(rank, world, vocab, ignored, spread, recompute):
    x, weight, targets = make(ignored=ignored, spread=spread, vocab=vocab)
    start, length = split_dim(vocab, world, rank)
    mine = weight[start : start + length]
    group = dist.group.WORLD
    options = {"vocab_start": start, "group": group, "recompute": recompute}
    with mock.patch.multiple(module, _MIN_ROWS={"cpu": 4}, _CHUNK_BYTES={"cpu": 1}):
        loss, dx, dw = ours(x, mine, targets, 0.1, **options)
    dist.all_reduce(dx)
    return loss, dx, dw


@pytest.mark.parametrize("world, vocab", [(2, 37), (4, 6)])  # of 6 rows, rank 3 has none
@pytest.mark.parametrize(
    "ignored, spread, recompute",
    [([], 1.0, False), ([0, 5, 20], 1.0, True), (ALL_IGNORED, 1.0, False), ([3], 1e4, False)],
)
def test_a_vocabulary_cut_over_ranks(ranks, world, vocab, ignored, spread, recompute):
    results = ranks.run(on_a_rank, vocab, ignored, spread, recompute, ranks=world)
    x, weight, targets = make(ignored=ignored, spread=spread, vocab=vocab)
    loss, dx, dw = plain(x, weight, targets, 0.1)
    off = 1e-13 * max(1.0, (x @ weight.t()).abs().max().item())
    for found, found_dx, _ in results:
        assert torch.equal(found, results[0][0])  # the same bits on every rank
        torch.testing.assert_close(found, loss, rtol=off, atol=off)
        torch.testing.assert_close(found_dx, dx, rtol=off, atol=off)
    found_dw = torch.cat([rank_dw for _, _, rank_dw in results])
    torch.testing.assert_close(found_dw, dw, rtol=0, atol=off * max(1.0, dw.abs().max().item()))
