"""Edge cases of attention: empty sizes, dead rows, NaN behind a mask, strides, large logits."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import pytest
import torch
from naive_attention import naive_attention
from torch import Tensor

import mcp_kernels
from mcp_kernels import flash_attn_func, flash_attn_kvpacked_func, flash_attn_qkvpacked_func


def _qkv(*sizes: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[Tensor, ...]:
    """q, k, v for sizes B, Sq, Sk, H, N, D, E."""
    batch, rows, keys, heads, kv_heads, dim, value_dim = sizes
    generator = torch.Generator().manual_seed(seed)
    shapes = (
        (batch, rows, heads, dim),
        (batch, keys, kv_heads, dim),
        (batch, keys, kv_heads, value_dim),
    )
    return tuple(
        torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for s in shapes
    )


def _outputs_and_grads(q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> list[Tensor]:
    out, lse = flash_attn_func(q, k, v, return_lse=True, **kwargs)
    return [out, lse, *torch.autograd.grad(out.sum(), (q, k, v))]


@pytest.mark.parametrize(
    "sizes",
    [(0, 3, 4, 2, 2, 5, 5), (2, 0, 4, 2, 2, 5, 5), (2, 3, 4, 0, 0, 5, 5), (2, 3, 4, 2, 2, 5, 0)],
    ids=["no_batch", "no_rows", "no_heads", "no_value_dim"],
)
def test_empty_sizes(sizes: tuple[int, ...]) -> None:
    q, k, v = _qkv(*sizes)
    out, lse, *grads = _outputs_and_grads(q, k, v, causal=True)
    assert out.shape == (sizes[0], sizes[1], sizes[3], sizes[6])
    assert lse.shape == (sizes[0], sizes[3], sizes[1])
    for grad, leaf in zip(grads, (q, k, v), strict=True):
        assert grad.shape == leaf.shape
        assert (grad == 0).all()


def test_no_keys() -> None:
    q, k, v = _qkv(2, 3, 0, 4, 2, 5, 6)
    out, lse, dq, dk, dv = _outputs_and_grads(q, k, v)
    assert (out == 0).all()
    assert (lse == -math.inf).all()
    assert (dq == 0).all()
    assert dk.numel() == dv.numel() == 0
    sink = torch.randn(4, dtype=torch.float64, requires_grad=True)
    out, lse = flash_attn_func(q, k, v, sink=sink, return_lse=True)
    assert (out == 0).all()
    assert torch.equal(lse, sink[None, :, None].expand(2, 4, 3))
    (dsink,) = torch.autograd.grad(lse.sum(), sink)
    torch.testing.assert_close(dsink, torch.full_like(sink, 6.0))


def test_head_dim_zero_is_the_mean_of_values() -> None:
    q, k, v = _qkv(1, 2, 5, 2, 1, 0, 3)
    out = flash_attn_func(q, k, v)
    torch.testing.assert_close(out, v.mean(1, keepdim=True).expand(1, 2, 2, 3))


def test_dead_rows_give_nothing_to_any_gradient() -> None:
    q, k, v = _qkv(1, 6, 2, 2, 1, 4, 4)
    out, lse, dq, dk, dv = _outputs_and_grads(q, k, v, causal=True)
    assert (out[:, :4] == 0).all()
    assert (lse[:, :, :4] == -math.inf).all()
    assert (dq[:, :4] == 0).all()
    alive = _outputs_and_grads(q[:, 4:].detach().requires_grad_(), k, v, causal=True)
    torch.testing.assert_close([dk, dv], alive[3:])


def test_one_query_bottom_right_is_not_causal() -> None:
    q, k, v = _qkv(2, 1, 7, 2, 2, 4, 4)
    assert torch.equal(flash_attn_func(q, k, v, causal=True), flash_attn_func(q, k, v))


def test_wide_window_is_no_window() -> None:
    q, k, v = _qkv(2, 5, 7, 2, 2, 4, 4)
    for window in ((7, 7), (10**9, 10**9), (-1, -1)):
        torch.testing.assert_close(
            flash_attn_func(q, k, v, window_size=window), flash_attn_func(q, k, v)
        )


def test_scale_zero_is_the_mean_of_visible_values() -> None:
    q, k, v = _qkv(1, 4, 4, 1, 1, 3, 2)
    out = flash_attn_func(q, k, v, softmax_scale=0.0, causal=True)
    counts = torch.arange(1, 5, dtype=torch.float64).view(1, 4, 1, 1)
    torch.testing.assert_close(out, v.cumsum(1) / counts)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("kind", ["causal", "window", "bool", "minus_inf"])
def test_hidden_nan_reaches_nothing(bad: float, kind: str) -> None:
    """Key 3 of batch entry 0 is bad: rows that see it are NaN, all else is as without it."""
    q, k, v = _qkv(2, 6, 6, 4, 2, 4, 3)
    kwargs: dict[str, Any] = {"causal": True}
    if kind == "window":
        kwargs = {"window_size": (1, 1)}
    elif kind != "causal":
        mask = torch.ones(6, 6, dtype=torch.bool)
        mask[[0, 1, 4], 3] = False
        kwargs = {"bias": mask}
        if kind == "minus_inf":
            kwargs = {"bias": torch.zeros(6, 6).masked_fill(~mask, -math.inf)}
    sees = {"causal": [3, 4, 5], "window": [2, 3, 4]}.get(kind, [2, 3, 5])
    blind = [i for i in range(6) if i not in sees]
    for spoiled in (1, 2):  # k, then v
        inputs = [t.detach().clone() for t in (q, k, v)]
        inputs[spoiled][0, 3] = bad
        own_q, own_k, own_v = (t.requires_grad_() for t in inputs)
        out = flash_attn_func(own_q, own_k, own_v, **kwargs)
        clean = flash_attn_func(q, k, v, **kwargs)
        torch.testing.assert_close(out[:, blind], clean[:, blind])
        torch.testing.assert_close(out[1], clean[1])
        if math.isnan(bad) or spoiled == 2:
            assert not out[0, sees].isfinite().any()
        # The blind rows' queries get clean gradients, and so does the other batch entry.
        grads = torch.autograd.grad(out[:, blind].sum(), inputs)
        expected = torch.autograd.grad(clean[:, blind].sum(), (q, k, v))
        for grad, wanted in zip(grads, expected, strict=True):
            torch.testing.assert_close(grad[1], wanted[1])
        torch.testing.assert_close(grads[0][0, blind], expected[0][0, blind])


def test_hidden_score_that_overflows_reaches_nothing() -> None:
    """Finite inputs whose product is not: the score of a hidden key is infinite in float32."""
    q, k, v = (t.detach() for t in _qkv(1, 4, 4, 1, 1, 2, 2, dtype=torch.float32))
    clean = flash_attn_func(q, k, v, causal=True)
    q[0, 2], k[0, 3] = 1e20, 1e20
    out = flash_attn_func(q, k, v, causal=True)
    assert out[0, 2].isfinite().all()
    torch.testing.assert_close(out[0, :2], clean[0, :2])
    window = flash_attn_func(q.flip(1), k.flip(1), v.flip(1), window_size=(0, -1))
    torch.testing.assert_close(window.flip(1), out)


def test_nan_query_spoils_its_row_only() -> None:
    q, k, v = (t.detach().clone() for t in _qkv(1, 200, 200, 2, 1, 4, 4))
    clean = flash_attn_func(q, k, v, causal=True)
    for bad in (math.nan, math.inf):
        q[0, 77] = bad
        out = flash_attn_func(q, k, v, causal=True)
        assert not out[0, 77].isfinite().any()
        others = [i for i in range(200) if i != 77]
        torch.testing.assert_close(out[:, others], clean[:, others])


def test_lowest_finite_bias_is_finite() -> None:
    """Rows whose bias is all finfo.min are uniform, not dead; -inf rows are dead."""
    for dtype in (torch.float32, torch.float64):
        q, k, v = (t.detach() for t in _qkv(1, 2, 5, 1, 1, 4, 3, dtype=dtype))
        bias = torch.full((2, 5), torch.finfo(dtype).min, dtype=dtype)
        bias[1] = -math.inf
        out, lse = flash_attn_func(q, k, v, bias=bias, return_lse=True)
        torch.testing.assert_close(out[:, 0], v.mean(1))
        assert (out[:, 1] == 0).all()
        assert (lse[..., 1] == -math.inf).all()


@pytest.mark.parametrize("shift", [1e4, -1e4])
def test_large_logits(shift: float) -> None:
    """Scores near +-1e4 in float32: no overflow, and the result of the shifted-back problem."""
    q, k, v = _qkv(1, 5, 9, 2, 2, 4, 4, dtype=torch.float32)
    bias = torch.full((1,), shift)
    out, lse, *grads = _outputs_and_grads(q, k, v, bias=bias)
    plain, plain_lse, *plain_grads = _outputs_and_grads(q, k, v)
    # A score of 1e4 has a spacing of 2^-10; it is off by half of that, and so is the exponent.
    spacing = 2.0**-10
    torch.testing.assert_close(out, plain, rtol=2 * spacing, atol=2 * spacing)
    torch.testing.assert_close(lse - shift, plain_lse, rtol=0, atol=2 * spacing)
    for grad, wanted in zip(grads, plain_grads, strict=True):
        assert grad.isfinite().all()
        scale = float(wanted.abs().max())
        torch.testing.assert_close(grad, wanted, rtol=0, atol=8 * spacing * scale)


def test_very_negative_rows_have_finite_gradients() -> None:
    q, k, v = _qkv(1, 4, 6, 1, 1, 4, 4, dtype=torch.float32)
    bias = torch.full((4, 6), -200.0)
    out, lse, *grads = _outputs_and_grads(q, k, v, bias=bias)
    assert (lse < -190).all()
    assert all(t.isfinite().all() for t in (out, *grads))


def _expanded(x: Tensor) -> Tensor:
    return x[:, :, :1].expand(-1, -1, x.shape[2], -1)


def _sliced(x: Tensor) -> Tensor:
    padded = x.new_zeros(*x.shape[:-1], 2 * x.shape[-1] + 1)
    padded[..., 1::2] = x
    return padded[..., 1::2]


def _transposed(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


@pytest.mark.parametrize("spread", [_expanded, _sliced, _transposed])
def test_any_strides(spread: Any) -> None:
    leaves = [spread(t.detach()) for t in _qkv(2, 5, 7, 4, 4, 6, 3)]
    strided = [t.requires_grad_() for t in leaves]
    plain = [t.detach().contiguous().requires_grad_() for t in leaves]
    for actual, wanted in zip(
        _outputs_and_grads(*strided, causal=True), _outputs_and_grads(*plain, causal=True),
        strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(actual, wanted, rtol=1e-13, atol=1e-14)
        assert actual.is_contiguous()


def test_view_wider_than_32_bit_offsets() -> None:
    """Strides of 2^31 elements on dimensions that are not stepped: offsets never overflow."""
    base = torch.randn(3 * 4 * 2 * 4, dtype=torch.float64)
    small = base.view(1, 3, 8, 4)
    wide = torch.as_strided(base, (1, 3, 8, 4), (2**33, 32, 4, 1))
    assert torch.equal(flash_attn_func(wide, wide, wide), flash_attn_func(small, small, small))


def test_packed_forms_equal_separate_tensors() -> None:
    qkv = torch.randn(2, 5, 3, 4, 6, dtype=torch.float64, requires_grad=True)
    q, k, v = qkv.unbind(2)
    kwargs: dict[str, Any] = {"causal": True, "softcap": 2.0, "softmax_scale": 0.4}
    out = flash_attn_func(q, k, v, **kwargs)
    assert torch.equal(flash_attn_qkvpacked_func(qkv, **kwargs), out)
    assert torch.equal(flash_attn_kvpacked_func(q, qkv[:, :, 1:], **kwargs), out)
    packed = torch.autograd.grad(flash_attn_qkvpacked_func(qkv, **kwargs).sum(), qkv)
    assert torch.equal(packed[0], torch.autograd.grad(out.sum(), qkv)[0])


def test_group_of_heads_shares_neighbouring_head() -> None:
    """Query head h uses KV head h // (H / N)."""
    q, k, v = _qkv(1, 3, 4, 6, 2, 4, 4)
    wide_k, wide_v = (t.repeat_interleave(3, dim=2) for t in (k, v))
    torch.testing.assert_close(flash_attn_func(q, k, v), flash_attn_func(q, wide_k, wide_v))


def test_order_of_keys_does_not_matter() -> None:
    q, k, v = _qkv(1, 3, 50, 2, 1, 4, 4)
    order = torch.randperm(50, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(
        flash_attn_func(q, k[:, order], v[:, order]), flash_attn_func(q, k, v)
    )


def test_results_repeat_bit_by_bit_and_do_not_depend_on_the_batch() -> None:
    q, k, v = _qkv(3, 200, 300, 4, 2, 8, 8, dtype=torch.float32)
    first, second = (_outputs_and_grads(q, k, v, causal=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    alone = flash_attn_func(q[1:2], k[1:2], v[1:2], causal=True)
    torch.testing.assert_close(first[0][1:2], alone, rtol=1e-5, atol=1e-6)


def test_probabilities() -> None:
    q, k, v = _qkv(1, 3, 4, 2, 1, 4, 4)
    out, lse, p = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    torch.testing.assert_close(p.sum(-1), torch.ones_like(lse))
    wide_v = v.repeat_interleave(2, dim=2)
    torch.testing.assert_close(torch.einsum("bhij,bjhe->bihe", p, wide_v), out)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"q": torch.zeros(2, 3, 4)}, ValueError, r"q must be \[B, S, H, D\], got \[2, 3, 4\]"),
        ({"q": torch.zeros(1, 2, 3, 4)}, ValueError, "must be a multiple of KV heads, got 3"),
        ({"k": torch.zeros(1, 5, 2, 4).half()}, TypeError, "q, k and v must have one dtype"),
        ({"k": torch.zeros(2, 5, 2, 4)}, ValueError, "must have one batch size, got 1, 2, 1"),
        ({"k": torch.zeros(1, 5, 1, 4)}, ValueError, "k and v must agree in all but the head dim"),
        ({"q": torch.zeros(1, 2, 2, 3)}, ValueError, "q and k must have one head dim, got 3 and 4"),
        ({"q": torch.zeros(1, 2, 2, 4).int()}, TypeError, "q must be float64, float32"),
        ({"window_size": (-2, 0)}, ValueError, "window_size must be >= 0, or -1"),
        ({"dropout_p": 1.5}, ValueError, r"dropout_p must be in \[0, 1\], got 1\.5"),
        ({"softcap": -1.0}, ValueError, "softcap must be >= 0"),
        ({"softcap": math.nan}, ValueError, "softcap must be >= 0"),
        ({"softcap": math.inf}, ValueError, "softcap must be >= 0 .* and finite, got inf"),
        ({"window_size": None}, ValueError, r"window_size must be \(left, right\), got None"),
        ({"window_size": (1, 2, 3)}, ValueError, r"window_size must be \(left, right\)"),
        ({"window_size": (1.5, 0)}, ValueError, "window_size must be integers"),
        ({"window_size": (2**63, 0)}, ValueError, r"window_size must be integers below 2\^63"),
        ({"q": [1.0]}, TypeError, "q, k and v must be tensors, got q list, k Tensor"),
        ({"causal_align": "left"}, ValueError, "causal_align must be"),
        ({"alibi_slopes": torch.zeros(3)}, ValueError, "alibi_slopes must be"),
        ({"alibi_slopes": torch.zeros(2).requires_grad_()}, ValueError, "must not require grad"),
        ({"sink": torch.zeros(3)}, ValueError, r"sink must be \[2\]"),
        ({"bias": torch.zeros(3, 5)}, ValueError, "bias must broadcast"),
        ({"bias": torch.zeros(2, 5).int()}, TypeError, "bias must be bool"),
    ],
)  # fmt: skip
def test_errors(change: dict[str, Any], error: type[Exception], match: str) -> None:
    arguments: dict[str, Any] = {"q": torch.zeros(1, 2, 2, 4)}
    arguments |= {name: torch.zeros(1, 5, 2, 4) for name in "kv"} | change
    with pytest.raises(error, match="flash_attn_func: .*" + match):
        flash_attn_func(**arguments)


def test_naive_oracle_agrees_with_torch() -> None:
    q, k, v = _qkv(2, 5, 5, 2, 2, 4, 4)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
    )
    out, _ = naive_attention(q, k, v, causal=True)
    torch.testing.assert_close(out.transpose(1, 2), expected)


@pytest.mark.parametrize("bias_shape", [(1, 1, 1, 1), (0, 2, 3, 5), (1, 2, 1, 5)])
def test_an_empty_batch_gives_the_bias_a_gradient_of_zeros(bias_shape):
    q, k = torch.randn(0, 3, 2, 4, requires_grad=True), torch.randn(0, 5, 2, 4)
    bias = torch.randn(bias_shape, requires_grad=True)
    for context in (contextlib.nullcontext, mcp_kernels.reference_only):
        with context():
            out = mcp_kernels.flash_attn_func(q, k, k, bias=bias)
            [grad] = torch.autograd.grad(out.sum(), bias)
        assert torch.equal(grad, torch.zeros(bias_shape))


def test_dropout_of_rows_that_see_nothing():
    # Bottom-right: the first 200 - 7 rows see no key, whole blocks of them.
    q = torch.randn(1, 200, 2, 4, requires_grad=True)
    k = torch.randn(1, 7, 2, 4, requires_grad=True)
    for context in (contextlib.nullcontext, mcp_kernels.reference_only):
        with context():
            out = mcp_kernels.flash_attn_func(q, k, k, dropout_p=0.5, causal=True)
            grads = torch.autograd.grad(out.square().sum(), (q, k))
        assert torch.equal(out[:, :193], torch.zeros(1, 193, 2, 4))
        assert torch.equal(grads[0][:, :193], torch.zeros(1, 193, 2, 4))
        assert all(grad.isfinite().all() for grad in grads)
