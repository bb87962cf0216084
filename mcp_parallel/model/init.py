"""Layout-independent initialisation: a value depends on seed, name and global index alone.

Each element draws Philox4x32-10 with key = hash(seed, name) and counter = its global flat index,
so any shard of any layout fills itself with the same numbers, without communication and without a
seed checkpoint. The normal is the sum of the eight 16-bit halves of one draw (Irwin-Hall): integer
arithmetic and one multiplication, so the bits are the same on every device. Its tails end at 4.9
standard deviations.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from mcp_kernels.ops.philox import philox_uint32
from mcp_parallel.config import ModelConfig

_HALVES = 8
_MEAN = _HALVES * 65535 / 2
_STD = math.sqrt(_HALVES * (65536.0**2 - 1) / 12)
# Elements made at a time: 4 words of 8 bytes each stay within a core's L2 cache.
_CHUNK = 1 << 15


def parameter_key(seed: int, name: str) -> int:
    """64-bit Philox key of a parameter."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def onto_residual(std: float, config: ModelConfig) -> float:
    """``std`` of a projection onto the residual stream, wo or w2, times ``residual_init_scale``.

    By default that is 1/sqrt(2 L), so that the stream's variance does not grow with depth.
    """
    scale = config.residual_init_scale
    return std / math.sqrt(2 * config.num_layers) if scale is None else std * scale


def parameter_std(name: str, config: ModelConfig) -> float | None:
    """Standard deviation of a parameter of Llama; None for ones (norm weights).

    0.02 as in GPT-2; projections onto the residual stream are scaled by ``onto_residual``.
    """
    if name.endswith("norm.weight"):
        return None
    if name.endswith((".wo", ".w2")):
        return onto_residual(0.02, config)
    return 0.02


@torch.no_grad()
def fill_shard(
    local: Tensor,
    name: str,
    global_shape: Sequence[int],
    offsets: Sequence[int],
    *,
    seed: int,
    std: float | None,
) -> None:
    """Fill ``local``, the part of parameter ``name`` that starts at ``offsets``, in place.

    Args:
        local: this rank's part, contiguous, any float dtype (the float64 value rounded once).
        name: the parameter's fully qualified name.
        global_shape: shape of the whole parameter, at most 2-D.
        offsets: global index of ``local[0, ..., 0]``.
        seed: the run's seed.
        std: standard deviation; None fills with ones, 0 with zeros.

    Cost: about 100 integer operations an element.
    """
    if std is None:
        local.fill_(1.0)
        return
    if std == 0:
        local.zero_()
        return
    key = parameter_key(seed, name)
    columns = global_shape[-1]
    width = local.shape[-1]
    flat = local.view(-1)
    for start in range(0, flat.numel(), _CHUNK):
        index = torch.arange(start, min(start + _CHUNK, flat.numel()), device=local.device)
        row = index // width + offsets[0] if len(global_shape) == 2 else 0
        counter = row * columns + index % width + offsets[-1]
        words = philox_uint32(key, counter)  # [4, n]
        total = (words & 0xFFFF).sum(0) + (words >> 16).sum(0)
        normal = (total - int(_MEAN)).double().mul_(std / _STD)
        flat[start : start + index.numel()] = normal.to(local.dtype)
