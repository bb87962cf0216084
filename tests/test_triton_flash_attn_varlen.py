"""Triton attention over sequences laid end to end: equal to each sequence on its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from triton_attention import DEVICE, IGNORE_NUMPY, exact, tiles_of, worst

from mcp_kernels.triton import flash_attn as body

pytestmark = pytest.mark.filterwarnings(IGNORE_NUMPY)

# Lengths of (q, k) that are empty on either side or on both, end inside a tile and at its edge;
# slack of q, of k, of both, of neither; no sequence at all.
LAYOUTS = {
    "usual": ([5, 20, 1], [7, 16, 33], 0, 0),
    "empty_ones": ([0, 17, 3, 0, 16], [4, 0, 9, 0, 16], 0, 0),
    "slack": ([3, 18], [18, 2], 5, 20),
    "slack_of_rows": ([16], [16], 33, 0),
    "only_slack": ([], [], 4, 5),
    "nothing": ([0, 0], [0, 0], 0, 0),
}
OPTIONS: dict[str, tuple[Any, ...]] = {
    "plain": (0.35, -1, -1, False, 0.0, 0.0),
    "causal": (0.35, -1, 0, False, 0.0, 0.0),
    "window_top_left": (0.35, 4, 6, True, 0.9, 0.0),
    "dropout": (0.35, 20, 0, False, 0.0, 0.3),
}


def _args(layout: str, options: str, dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    q_lengths, k_lengths, q_slack, k_slack = LAYOUTS[layout]
    generator = torch.Generator().manual_seed(len(layout))

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype).to(DEVICE)

    def ends(lengths: list[int], as_dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([0, *lengths], device=DEVICE).cumsum(0).to(as_dtype)

    rows, keys = sum(q_lengths) + q_slack, sum(k_lengths) + k_slack
    rng = torch.tensor([77, 0], device=DEVICE) if options == "dropout" else None
    slopes = torch.rand(len(q_lengths), 4, generator=generator).to(DEVICE)
    return (
        *(draw(rows, 4, 9), draw(keys, 2, 9), draw(keys, 2, 11)),
        *(ends(q_lengths, torch.int32), ends(k_lengths, torch.int64)),
        *(slopes if q_lengths else None, draw(4), rng, *OPTIONS[options]),
    )


# Every layout, and every option on the layout that has most kinds of sequences.
PAIRS = [(layout, "causal") for layout in LAYOUTS]
PAIRS += [("slack", name) for name in OPTIONS if name != "causal"]


@pytest.mark.parametrize(("layout", "options"), PAIRS)
def test_forward(layout: str, options: str, poisoned_memory: None) -> None:
    args = _args(layout, options)
    with tiles_of(16, 16):
        got = body.flash_attn_varlen(*args)
    wanted = exact("flash_attn_varlen", args)
    for actual, expected in zip(got, wanted, strict=True):
        assert torch.equal(actual.double().isinf(), expected.isinf())
        # Scores of at most 20 over 9 dims, sums of at most 33 terms: 20 * 3 + 6 + 8 roundings.
        bound = torch.full_like(expected, 80 * 2.0**-24 * 4)
        seen = expected.isfinite()
        assert ((actual.double() - expected).abs() <= bound)[seen].all(), worst(
            actual.double(), expected, bound
        )


@pytest.mark.parametrize(("layout", "options"), PAIRS)
def test_backward(layout: str, options: str, poisoned_memory: None) -> None:
    args = _args(layout, options)
    generator = torch.Generator().manual_seed(1)
    with tiles_of(16, 16):
        out, lse = body.flash_attn_varlen(*args)
        dout, dlse = (torch.randn(t.shape, generator=generator).to(DEVICE) for t in (out, lse))
        got = body.flash_attn_varlen_bwd(dout, dlse, *args[:3], out, lse, *args[3:])
    wide = (dout, dlse, *args[:3], *exact("flash_attn_varlen", args), *args[3:])
    wanted = exact("flash_attn_varlen_bwd", wide)
    for actual, expected in zip(got, wanted, strict=True):
        assert actual.shape == expected.shape
        error, size = (float(t.norm()) for t in (actual.double() - expected, expected))
        assert error <= 300 * 2.0**-24 * max(size, 1e-3 * expected.numel() ** 0.5)
        if size == 0:
            assert (actual == 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_narrow_types_are_calls_of_their_own(dtype: torch.dtype, poisoned_memory: None) -> None:
    """Bit for bit; test_triton_flash_attn_narrow.py says what a call's bits are worth."""
    q, k, v, q_ends, k_ends, slopes, sink, rng, *options = args = _args("slack", "causal", dtype)
    generator = torch.Generator().manual_seed(1)
    with tiles_of(16, 16):
        out, lse = body.flash_attn_varlen(*args)
        dout = torch.randn(out.shape, generator=generator).to(dtype).to(DEVICE)
        dlse = torch.randn(lse.shape, generator=generator).to(DEVICE)
        dq, dk, dv, _ = body.flash_attn_varlen_bwd(dout, dlse, q, k, v, out, lse, *args[3:])
        for b in range(2):
            rows, keys = slice(*q_ends[b : b + 2]), slice(*k_ends[b : b + 2])
            rest = (None, slopes[b : b + 1], sink, rng)
            own = [t[None, part] for t, part in ((q, rows), (k, keys), (v, keys))]
            own_out, own_lse = body.flash_attn(*own, *rest, *options)
            got = body.flash_attn_bwd(
                dout[None, rows], dlse[None, :, rows], *own, own_out, own_lse, *rest, False,
                *options,
            )  # fmt: skip
            assert torch.equal(out[rows], own_out[0])
            for packed, part, alone in zip((dq, dk, dv), (rows, keys, keys), got, strict=False):
                assert torch.equal(packed[part], alone[0])
    assert all((t[end:] == 0).all() for t, end in ((dq, 21), (dk, 20), (dv, 20)))
