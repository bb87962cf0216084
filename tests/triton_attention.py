"""What tests of the Triton attention kernels share: arguments of the ops, exact results, bounds.

The kernels are called as the ops call them, on a GPU where there is one and in Triton's interpreter
elsewhere, and are held to the references in float64 on the same rounded inputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from test_attention import Case, make
from torch import Tensor

import mcp_kernels
from mcp_kernels.ops.attention_check import check_alibi, check_bias, make_options
from mcp_kernels.triton import flash_attn as body
from mcp_kernels.triton import flash_attn_config
from mcp_kernels.triton.flash_attn_config import Tile

# A GPU where there is one; Triton's interpreter on CPU (conftest.py) elsewhere.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# numpy says so where a kernel makes or compares infinities; they are meant.
IGNORE_NUMPY = "ignore:(invalid value|overflow|divide by zero|All-NaN slice) enc:RuntimeWarning"

TILES = (
    "forward_tile",
    "key_gradient_tile",
    "query_gradient_tile",
    "bias_gradient_tile",
    "delta_tile",
)


@contextmanager
def tiles_of(rows: int, keys: int) -> Iterator[None]:
    """Every kernel takes tiles of this size, so that small problems have several."""
    tile, own = Tile(rows, keys, 4, 1), {name: getattr(flash_attn_config, name) for name in TILES}
    try:
        for name in TILES:
            setattr(flash_attn_config, name, lambda *size: tile)
        yield
    finally:
        for name, function in own.items():
            setattr(flash_attn_config, name, function)


def op_args(
    case: Case, dtype: torch.dtype, *, dropout_p: float = 0.0, seed: int = 5
) -> tuple[Any, ...]:
    """The arguments of ``mcp_kernels::flash_attn`` for a case, on the device."""
    leaves, kwargs = make(case, dtype)
    q, k, v = (t.detach() for t in leaves[:3])
    batch, rows, heads, head_dim = q.shape
    bias = check_bias("test", kwargs.pop("bias", None), (batch, heads, rows, k.shape[1]))
    slopes = check_alibi("test", kwargs.pop("alibi_slopes", None), batch, heads)
    sink = kwargs.pop("sink", None)
    scalars = {
        "softmax_scale": None,
        "causal": False,
        "window_size": (-1, -1),
        "softcap": 0.0,
        **kwargs,
    }
    options = make_options("test", head_dim, dropout_p=dropout_p, **scalars)
    rng = torch.tensor([(1 << 40) + seed, 3]) if dropout_p else None
    tensors = (q, k, v, bias, slopes, sink, rng)
    return *(None if t is None else t.detach().to(DEVICE) for t in tensors), *options


def widen(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same arguments with floating tensors in float64."""
    return tuple(
        arg.double() if isinstance(arg, Tensor) and arg.is_floating_point() else arg for arg in args
    )


def exact(op: str, args: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """The reference's results in float64 on the same inputs."""
    with mcp_kernels.reference_only():
        return getattr(torch.ops.mcp_kernels, op)(*widen(args))


def score_error(args: tuple[Any, ...]) -> float:
    """How far a float32 score may be from the exact one.

    A product is a sum of D terms; scale, softcap, bias and ALiBi round it a few times more.
    """
    q, k, _, bias, slopes, *_ = widen(args)
    scale, group = args[7], q.shape[2] // k.shape[2]
    wide_k = k.abs().repeat_interleave(group, dim=2)
    largest = float((torch.einsum("bihd,bjhd->bhij", q.abs(), wide_k) * abs(scale)).max())
    extra = 0.0
    if bias is not None and bias.dtype != torch.bool:
        extra += float(bias.abs().masked_fill(bias == -torch.inf, 0.0).max())
    if slopes is not None:
        extra += float(slopes.abs().max()) * (q.shape[1] + k.shape[1])
    u = 2.0**-24
    return u * (q.shape[3] ** 0.5 * largest + 8 * (largest + extra))


def assert_forward_close(
    actual: tuple[Tensor, Tensor], args: tuple[Any, ...], num_tiles: int = 1, op: str = "flash_attn"
) -> None:
    """Hold (out, lse) to float64 by a bound that follows from the arithmetic.

    With P the exact probabilities and u, u_p, u_out the roundoffs of float32, of the type that
    probabilities are multiplied in and of the output: a score is off by ds, hence a probability by
    exp(2 ds) - 1; it is rounded once before the product with v, which is a sum of Sk terms that is
    rescaled once a tile.
    """
    out, lse = (t.double() for t in actual)
    wanted, wanted_lse = exact(op, args)
    q, k, v, *rest = args
    magnitude, _ = exact(op, (q, k, v.abs(), *rest))
    u, u_out = 2.0**-24, torch.finfo(q.dtype).eps / 2
    ds = score_error(args)
    u_p = 0.0 if q.dtype == torch.float32 else u_out
    bound = u_out * wanted.abs()
    bound += (2 * ds + u_p + (k.shape[1] ** 0.5 + 8 + 2 * num_tiles) * u) * magnitude
    assert torch.equal(out.isnan(), wanted.isnan())
    assert ((out - wanted).abs() <= bound * (1 + u_out)).all(), worst(out, wanted, bound)
    assert torch.equal(lse.isinf(), wanted_lse.isinf())
    lse_bound = ds + (k.shape[1] ** 0.5 + 8 + 2 * num_tiles) * u * (1 + wanted_lse.abs())
    seen = wanted_lse.isfinite()
    assert ((lse - wanted_lse).abs() <= lse_bound)[seen].all(), worst(lse, wanted_lse, lse_bound)


def worst(actual: Tensor, wanted: Tensor, bound: Tensor) -> str:
    """The element that is furthest out of its bound, in words."""
    ratio = ((actual - wanted).abs() / bound).nan_to_num(0.0)
    at = int(ratio.argmax())
    values = (float(t.flatten()[at]) for t in (actual, wanted, ratio))
    return "element {} is {:.9g}, wanted {:.9g}: {:.3g} times the bound".format(at, *values)


NAMES = ("dq", "dk", "dv", "dbias", "dsink")


def gradients(
    args: tuple[Any, ...], *, has_dlse: bool = True
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """((dq, dk, dv, dbias, dsink), the same by the reference in float64 on the same inputs)."""
    out, lse = body.flash_attn(*args)
    assert_forward_close((out, lse), args, num_tiles=4)
    dout = output_gradient(args)
    generator = torch.Generator().manual_seed(9)
    dlse = torch.randn(lse.shape, generator=generator).to(DEVICE) if has_dlse else None
    q, k, v, bias, slopes, sink, rng, *options = args
    needs_dbias = bias is not None and bias.dtype != torch.bool
    rest = (bias, slopes, sink, rng, needs_dbias, *options)
    got = body.flash_attn_bwd(dout, dlse, q, k, v, out, lse, *rest)
    exact_out, exact_lse = exact("flash_attn", args)
    wide = widen((dout, dlse, q, k, v, exact_out, exact_lse, *rest))
    with mcp_kernels.reference_only():
        wanted = torch.ops.mcp_kernels.flash_attn_bwd(*wide)
    for name, actual, expected in zip(NAMES, got, wanted, strict=True):
        assert actual.shape == expected.shape, name
        assert actual.is_contiguous(), name
    return got, wanted


def output_gradient(args: tuple[Any, ...]) -> Tensor:
    """A gradient of the call's output, drawn."""
    q, _, v, *_ = args
    drawn = torch.randn((*q.shape[:-1], v.shape[-1]), generator=torch.Generator().manual_seed(8))
    return drawn.to(q.dtype).to(DEVICE)


def relative_error(actual: Tensor, wanted: Tensor) -> float:
    """Error in the norm; absolute where the exact one is 0."""
    norm = float(wanted.norm())
    return float((actual.double() - wanted).norm()) / norm if norm else float(actual.norm())
