"""The switch adds: sums and stores through a multicast address, for GPUs of one NVLink fabric.

PTX, so there is no interpreter for it; it compiles for sm_90 in tests, and a GPU check that finds a
multicast address runs it.
"""

# ruff: noqa: ANN001, ANN201
# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false
from __future__ import annotations

import triton
import triton.language as tl

_FENCE = tl.constexpr("fence.proxy.alias; mov.u32 $0, 0;")
_SUM_F32 = tl.constexpr("multimem.ld_reduce.relaxed.sys.global.add.v4.f32 {$0, $1, $2, $3}, [$4];")
_SUM_BF16 = tl.constexpr(
    "multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.bf16x2 {$0, $1, $2, $3}, [$4];"
)
_SUM_F16 = tl.constexpr(
    "multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.f16x2 {$0, $1, $2, $3}, [$4];"
)
_STORE = tl.constexpr(
    "multimem.st.relaxed.sys.global.v4.f32 [$1], {$2, $3, $4, $5}; mov.u32 $0, 0;"
)


@triton.jit
def fence_aliases():
    """Order a rank's accesses by its own address with those by the multicast address."""
    tl.inline_asm_elementwise(_FENCE, "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def multicast_sum_tile(at, TYPE: tl.constexpr, SIZE: tl.constexpr):
    """Replace SIZE elements at the multicast address ``at`` by their sums over the ranks.

    Added in float32 by the switch; the sums land in every rank's memory.
    """
    UNITS: tl.constexpr = SIZE * TYPE.primitive_bitwidth // 128
    ASM: tl.constexpr = (
        _SUM_F32 if tl.float32 == TYPE else _SUM_BF16 if tl.bfloat16 == TYPE else _SUM_F16
    )
    units = at + tl.arange(0, UNITS).to(tl.int64) * 16
    fence_aliases()
    a, b, c, d = tl.inline_asm_elementwise(
        ASM,
        "=r,=r,=r,=r,l",
        [units],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=False,
        pack=1,
    )
    tl.inline_asm_elementwise(
        _STORE, "=r,l,r,r,r,r", [units, a, b, c, d], dtype=tl.int32, is_pure=False, pack=1
    )
    fence_aliases()
