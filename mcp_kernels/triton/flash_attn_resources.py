"""Registers, shared memory and spills of the attention kernels, without a GPU.

``python -m mcp_kernels.triton.flash_attn_resources`` prints the table of the README.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch

from mcp_kernels.ops.attention_mask import AttentionOptions
from mcp_kernels.triton.cubin import Resources, compile_launch
from mcp_kernels.triton.flash_attn_backward_bias import bias_gradient_launch
from mcp_kernels.triton.flash_attn_backward_delta import delta_launch
from mcp_kernels.triton.flash_attn_backward_keys import key_gradients_launches
from mcp_kernels.triton.flash_attn_backward_queries import query_gradients_launch
from mcp_kernels.triton.flash_attn_cache import Cache
from mcp_kernels.triton.flash_attn_config import A100, H100, Tile
from mcp_kernels.triton.flash_attn_decode import decode_launches
from mcp_kernels.triton.flash_attn_forward import forward_launch
from mcp_kernels.triton.flash_attn_launch import Problem, Sequences
from mcp_kernels.triton.launch import Launch

CHIPS = {80: A100, 90: H100}


class Variant(NamedTuple):
    """What is switched on; every one is a set of kernels of its own."""

    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    has_alibi: bool = False
    has_sink: bool = False
    bias: torch.dtype | None = None
    dropout_p: float = 0.0
    is_varlen: bool = False


VARIANTS = {
    "full": Variant(),
    "causal": Variant((-1, 0)),
    "window_softcap": Variant((1023, 0), softcap=30.0),
    "alibi_sink": Variant((-1, 0), has_alibi=True, has_sink=True),
    "varlen": Variant((-1, 0), is_varlen=True),
    "dropout": Variant((-1, 0), dropout_p=0.1),
    "mask": Variant(bias=torch.bool),
    "bias": Variant(bias=torch.bfloat16),
}


def _empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Nothing is allocated: a launch asks for types, shapes and strides."""
    return torch.empty(shape, dtype=dtype, device="meta")


def _problem(head_dim: int, variant: Variant, arch: int, dtype: torch.dtype) -> Problem:
    """8192 rows and keys of 32 heads on 8 KV heads."""
    q, k = (_empty(1, 8192, heads, head_dim, dtype=dtype) for heads in (32, 8))
    sequences = None
    if variant.is_varlen:
        q, k, ends = q[0], k[0], _empty(5, dtype=torch.int64)
        sequences = Sequences(ends, ends, 2)
    return Problem(
        *(q, k, k),
        bias=None if variant.bias is None else _empty(1, 1, 8192, 8192, dtype=variant.bias),
        slopes=_empty(1, 32, dtype=torch.float32) if variant.has_alibi else None,
        sink=_empty(32, dtype=dtype) if variant.has_sink else None,
        rng=_empty(2, dtype=torch.int64) if variant.dropout_p else None,
        options=AttentionOptions(
            head_dim**-0.5, *variant.window, False, variant.softcap, variant.dropout_p
        ),
        sequences=sequences,
        target=CHIPS[arch],
    )


def attention_launches(
    head_dim: int, variant: str, arch: int, dtype: torch.dtype = torch.bfloat16
) -> dict[str, Launch[Tile]]:
    """The kernels of a training step and, where there is one, of a decode step, by name."""
    chosen = VARIANTS[variant]
    problem = _problem(head_dim, chosen, arch, dtype)
    q, k = problem.q, problem.k
    lse = _empty(*((1, 32, 8192) if q.dim() == 4 else (32, 8192)), dtype=torch.float32)
    passes = key_gradients_launches(problem, q, lse, lse, k, k)
    names = ("dk_dv",) if len(passes) == 1 else ("dv", "dk")
    launches = {
        "forward": forward_launch(problem, q, lse),
        "delta": delta_launch(problem, q, q, None, lse, lse),
        **dict(zip(names, passes, strict=True)),
        "dq": query_gradients_launch(problem, q, lse, lse, q),
    }
    if problem.bias is not None and problem.bias.dtype != torch.bool:
        launches["dbias"] = bias_gradient_launch(problem, q, lse, lse, problem.bias)
    if problem.is_plain and not chosen.is_varlen:
        step = replace(problem, q=q[:, :1])
        cache = Cache(_empty(1, dtype=torch.int32), None, None, None, 8192)
        launches["decode"] = decode_launches(step, cache, q[:, :1], lse[:, :, :1])[0]
    return launches


def feature_launches(dtype: torch.dtype, arch: int) -> dict[str, Launch[Tile]]:
    """Kernels with everything switched on that ``attention_launches`` leaves off."""

    def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return _empty(*shape, dtype=dtype)

    options = AttentionOptions(0.1, 100, 0, True, 0.0, 0.1)
    q, k, lse = empty(2, 999, 8, 96), empty(2, 777, 2, 96), empty(2, 8, 999, dtype=torch.float32)
    slopes, sink = empty(1, 8, dtype=torch.float32), empty(8)
    rng, chip = empty(2, dtype=torch.int64), CHIPS[arch]
    launches = {}
    biases = {"bool": empty(2, 1, 1, 777, dtype=torch.bool), "float": empty(1, 8, 1, 777)}
    for name, bias in biases.items():
        problem = Problem(q, k, k, bias, slopes, sink, rng, options, target=chip)
        passes = key_gradients_launches(problem, q, lse, lse, k, k)
        launches |= {
            f"{name} bias forward": forward_launch(problem, q, lse),
            f"{name} bias delta": delta_launch(problem, q, q, lse, lse, lse),
            f"{name} bias dq": query_gradients_launch(problem, q, lse, lse, q),
            **{f"{name} bias dk, dv {i}": launch for i, launch in enumerate(passes)},
        }
        if name == "float":
            launches["dbias"] = bias_gradient_launch(problem, q, lse, lse, bias)

    ends = empty(5, dtype=torch.int64)
    flat = Problem(
        *(q[0], k[0], k[0], None, slopes, sink, rng, options),
        sequences=Sequences(ends, ends, 2),
        target=chip,
    )  # fmt: skip
    by_head = lse[0]
    launches["varlen forward"] = forward_launch(flat, q[0], by_head)
    launches["varlen delta"] = delta_launch(flat, q[0], q[0], by_head, by_head, by_head)
    launches["varlen dq"] = query_gradients_launch(flat, q[0], by_head, by_head, q[0])
    for i, launch in enumerate(key_gradients_launches(flat, q[0], by_head, by_head, k[0], k[0])):
        launches[f"varlen dk, dv {i}"] = launch

    step = Problem(q, k, k, None, slopes, sink, None, options, target=chip)
    one = empty(2, dtype=torch.int32)
    caches = {
        "rows": Cache(one, one, one, None, 777),
        "pages": Cache(one, None, None, empty(2, 30, dtype=torch.int32), 30 * 777),
    }
    for name, cache in caches.items():
        for i, launch in enumerate(decode_launches(step, cache, q, lse)):
            launches[f"decode {name} {i}"] = launch
    return launches


def rows(
    head_dims: Iterable[int], variants: Iterable[str], arches: Iterable[int]
) -> Iterator[tuple[str, Launch[Tile], Resources]]:
    """(label, launch, what it takes) of each kernel."""
    for arch in arches:
        for head_dim in head_dims:
            for variant in variants:
                for name, launch in attention_launches(head_dim, variant, arch).items():
                    label = f"sm_{arch} D={head_dim} {variant} {name}"
                    yield label, launch, compile_launch(launch, arch)


def main(argv: list[str]) -> None:
    """Print the table; head dims may be given."""
    head_dims = tuple(map(int, argv)) or (64, 128, 256)
    print("kernel | rows x keys | warps | stages | registers | spilled B | shared KiB | wgmma")  # noqa: T201
    for label, launch, used in rows(head_dims, tuple(VARIANTS), tuple(CHIPS)):
        tile = launch.tile
        print(  # noqa: T201
            f"{label} | {tile.rows} x {tile.keys} | {tile.num_warps} | {tile.num_stages} | "
            f"{used.registers} | {used.spill_bytes} | {used.shared_bytes / 1024:.0f} | "
            f"{'yes' if used.has_wgmma else 'no'}",
            flush=True,
        )


if __name__ == "__main__":
    main(sys.argv[1:])
