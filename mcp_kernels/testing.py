"""Input makers and error bounds that tests and benchmarks share."""

from __future__ import annotations

import torch
from torch import Tensor


def assert_same_bits(actual: Tensor, expected: Tensor, what: str = "result") -> None:
    """Fail unless two tensors hold the same bytes: NaN payloads and the sign of zero count.

    Raises:
        AssertionError: shapes, dtypes or bytes differ; names the first element that does.
    """
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        raise AssertionError(
            f"{what}: got {actual.dtype}{list(actual.shape)}, "
            f"expected {expected.dtype}{list(expected.shape)}"
        )
    size = actual.element_size()
    pairs = (t.contiguous().view(-1).view(torch.uint8).view(-1, size) for t in (actual, expected))
    differs = torch.ne(*pairs).any(dim=1).nonzero().view(-1)
    if differs.numel():
        at = int(differs[0])
        raise AssertionError(
            f"{what}: {differs.numel()} of {actual.numel()} elements differ, first at {at}: "
            f"got {actual.view(-1)[at].item()!r}, expected {expected.view(-1)[at].item()!r}"
        )


def make_gradient(
    numel: int, seed: int = 0, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> Tensor:
    """``[numel]`` gradient-like values: normal, with a magnitude that wanders over 3 decades."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(numel, generator=generator)
    magnitude = 10 ** (-3 * torch.rand(-(-numel // 256), generator=generator))
    values *= magnitude.repeat_interleave(256)[:numel]
    return values.to(dtype=dtype, device=device)


def make_hostile(numel: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """``[numel]`` finite values with zeros of both signs, denormals and the largest float32."""
    values = make_gradient(numel, seed)
    special = torch.tensor([0.0, -0.0, 1e-45, -1e-45, 1.1e-38, -1.1e-38, 3e38, -3e38, 1e20, -1e-30])
    generator = torch.Generator().manual_seed(seed + 1)
    picked = torch.rand(numel, generator=generator) < 0.3
    which = torch.randint(len(special), (numel,), generator=generator)
    return torch.where(picked, special[which], values).to(dtype)


def sum_error_bound(exact: Tensor, magnitude: Tensor, num_terms: int, dtype: torch.dtype) -> Tensor:
    """Most that a sum of ``num_terms`` products may be off, elementwise, when rounded once.

    ``0.5 eps_out |exact| + sqrt(num_terms) eps_acc magnitude``: one rounding to ``dtype``, and a
    random walk of roundings in the accumulator, which is float64 for float64 and float32 for all
    else. Below the normal numbers of ``dtype`` all are as far apart as the least of those.

    Args:
        exact: the result in float64 from the same rounded inputs.
        magnitude: the same sum over absolute values, ``|A| |B|`` for a matmul.
        num_terms: terms of one sum.
        dtype: type of the result.

    Returns:
        Float64, the shape of ``exact``.
    """
    acc_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    limits = torch.finfo(dtype)
    once = 0.5 * limits.eps * exact.abs().clamp_min(limits.smallest_normal)
    return once + num_terms**0.5 * torch.finfo(acc_dtype).eps * magnitude
