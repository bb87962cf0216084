"""flash_attn_varlen_func beside torch's SDPA on the same sequences, padded and masked."""

from __future__ import annotations

import torch
from conftest import Peer

from mcp_kernels import flash_attn_varlen_func

HEADS, DIM, NUM_SEQUENCES, LONGEST = 8, 32, 16, 256


def bench_varlen(compare):
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(16, LONGEST + 1, (NUM_SEQUENCES,), generator=generator)
    ends = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).to(torch.int32)
    q, k, v = (torch.randn(int(ends[-1]), HEADS, DIM) for _ in range(3))
    is_used = torch.arange(LONGEST) < lengths[:, None]  # [B, S]
    padded = torch.zeros(3, NUM_SEQUENCES, LONGEST, HEADS, DIM)
    for into, packed in zip(padded, (q, k, v), strict=True):
        into[is_used] = packed
    mask = is_used[:, None, None, :] & torch.ones(LONGEST, LONGEST, dtype=torch.bool).tril()

    def ours():
        return flash_attn_varlen_func(q, k, v, ends, ends, LONGEST, LONGEST, causal=True)

    def peer():
        return torch.nn.functional.scaled_dot_product_attention(
            *(t.transpose(1, 2) for t in padded), attn_mask=mask
        )

    torch.testing.assert_close(ours(), peer().transpose(1, 2)[is_used], rtol=1e-5, atol=1e-5)
    compare(ours, 4 * 4 * q.numel(), {"sdpa_padded": Peer(peer)})
