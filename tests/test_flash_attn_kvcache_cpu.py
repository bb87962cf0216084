"""The compiled body of flash_attn_kvcache against the reference: caches by bits, results by bound.

What a call writes is the same formula in the same type, so caches must agree in every bit. Results
are held against the reference in float64 on what the cache then holds, elementwise. With u the unit
roundoff of the sums and u_out that of the output, a score is a sum of D products, then scaled,
capped and shifted, so it is off by
    ds = (sqrt(D) + 8) u |scale| |q| |k| + 8 u slope distance
a probability by the factor exp(2 ds) - 1, and the product with v is a sum of n terms:
    |out - exact| <= u_out |exact| + (2 ds + (sqrt(n) + 8) u) (P |v|)
and u_out (P |v|) more where P is rounded on its way into products of bfloat16.
P |v| is the reference's own result for |v|. Below the least normal number rounding is absolute.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_attention import naive_attention
from test_flash_attn_cpu import _C, DTYPES, ISAS, running_on, threads
from torch import Tensor

from mcp_kernels import flash_attn_with_kvcache, reference_only, which_backend
from mcp_kernels.ops.rotary import rotate
from mcp_kernels.testing import assert_same_bits

# Around registers, groups of 16 keys, tiles of 128 keys and splits of 1024.
DIMS = [0, 1, 7, 16, 40, 64, 80, 96, 111, 128]
CAPACITIES = [1, 15, 16, 40, 129, 300, 1030]
ROWS = [1, 1, 2, 3, 5, 17, 70]

pytestmark = pytest.mark.skipif(not ISAS, reason="a pure-Python install has no compiled body")


class Call:
    """Arguments of one call, drawn from a seed; the cache holds NaN wherever nothing may read."""

    def __init__(
        self, seed: int, dtype: torch.dtype, sizes: dict[str, int], form: set[str]
    ) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype, self.sizes, self.form = dtype, sizes, form
        batch, new, capacity = sizes["batch"], sizes["new"], sizes["capacity"]
        spare = capacity - new
        self.lengths = self.integers(0 if "long" not in form else spare - 9, spare + 1, batch)
        self.starts = torch.zeros_like(self.lengths)
        if "leftpad" in form and "pages" not in form:
            self.starts = (torch.rand(batch, generator=self.generator) * (self.lengths + 1)).long()
        heads = sizes["kv_heads"] * sizes["group"]
        self.q = self.tensor(batch, sizes["rows"], heads, sizes["dim"])
        widths = {"k": sizes["dim"], "v": sizes["value_dim"]}
        self.new = {
            n: self.tensor(batch, new, sizes["kv_heads"], w) if new else None
            for n, w in widths.items()
        }
        self.table, self.entries = None, None
        if "pages" in form:
            page = sizes["page"]
            width = -(-capacity // page)
            order = torch.randperm(batch * width + 2, generator=self.generator)
            self.table = order[: batch * width].view(batch, width)
            shape = (batch * width + 2, page)
            for b in range(batch):  # what lies past the end is never looked at
                self.table[b, -(-(int(self.lengths[b]) + new) // page) :] = -9
        else:
            shape = (batch + 2, capacity)
            if "entries" in form:
                self.entries = torch.randperm(batch + 2, generator=self.generator)[:batch]
        self.caches = {n: self.cache(*shape, w) for n, w in widths.items()}
        self.slopes = self.sink = self.cos = self.sin = None
        if "slopes" in form:
            self.slopes = torch.rand(batch, heads, generator=self.generator)
        if "sink" in form:
            self.sink = torch.randn(heads, generator=self.generator)
        if "rotary" in form and new:
            pairs = int(self.integers(0, sizes["dim"] // 2 + 1, 1))
            angles = torch.rand(capacity + sizes["rows"] + 1, pairs, generator=self.generator) * 6
            self.cos, self.sin = angles.cos(), angles.sin()

    def integers(self, low: int, high: int, count: int) -> Tensor:
        return torch.randint(low, max(high, low + 1), (count,), generator=self.generator)

    def tensor(self, *shape: int) -> Tensor:
        b, s, h, d = shape
        if "heads first" in self.form:
            return torch.randn(b, h, s, d, generator=self.generator).to(self.dtype).transpose(1, 2)
        if "every second" in self.form:
            return torch.randn(b, s, h, 2 * d, generator=self.generator).to(self.dtype)[..., ::2]
        return torch.randn(*shape, generator=self.generator).to(self.dtype)

    def places(self, b: int, positions: range) -> tuple[Any, Any]:
        at = torch.arange(positions.start, positions.stop)
        if self.table is not None:
            return self.table[b, at // self.sizes["page"]], at % self.sizes["page"]
        return (b if self.entries is None else self.entries[b]), at

    def cache(self, first: int, second: int, width: int) -> Tensor:
        cache = self.tensor(first, second, self.sizes["kv_heads"], width)
        is_read = torch.zeros(first, second, dtype=torch.bool)
        for b in range(self.sizes["batch"]):
            is_read[self.places(b, range(int(self.starts[b]), int(self.lengths[b])))] = True
        cache[~is_read] = math.nan
        return cache

    def run(self, caches: dict[str, Tensor], **options: Any) -> tuple[Tensor, Tensor]:
        int_type = torch.int32 if "int32" in self.form else torch.int64
        return flash_attn_with_kvcache(
            self.q,
            caches["k"],
            caches["v"],
            self.new["k"],
            self.new["v"],
            self.cos,
            self.sin,
            self.lengths.to(int_type),
            None if self.entries is None else self.entries.to(int_type),
            self.starts.to(int_type) if "leftpad" in self.form and self.table is None else None,
            None if self.table is None else self.table.to(int_type),
            alibi_slopes=self.slopes,
            sink=self.sink,
            rotary_interleaved="interleaved" in self.form,
            return_softmax_lse=True,
            **options,
        )

    def exact(self, caches: dict[str, Tensor], options: dict[str, Any]) -> list[Tensor]:
        """(out, lse, P |v|) in float64 from what the caches hold after the call."""
        q = self.q
        if self.cos is not None and self.sin is not None:
            windowed = options["causal"] or max(options["window_size"]) >= 0
            steps = q.shape[1] if windowed else 1
            parts = []
            for b, before in enumerate((self.lengths - self.starts).tolist()):
                at = range(before, before + steps)
                parts.append(
                    rotate(q[b : b + 1], self.cos, self.sin, at, "interleaved" in self.form)
                )
            q = torch.cat(parts) if parts else q
        if options.get("softmax_scale") is None:
            options = options | {"softmax_scale": 1 / math.sqrt(q.shape[3] or 1)}
        results = []
        for use in (lambda v: v, torch.abs):
            with reference_only():
                results.append(
                    flash_attn_with_kvcache(
                        q.double(),
                        caches["k"].double(),
                        use(caches["v"].double()),
                        cache_seqlens=self.lengths + self.sizes["new"],
                        cache_batch_idx=self.entries,
                        cache_leftpad=self.starts if self.table is None else None,
                        block_table=self.table,
                        alibi_slopes=self.slopes,
                        sink=self.sink,
                        return_softmax_lse=True,
                        **options,
                    )
                )
        return [*results[0], results[1][0]]

    def score_error(self, caches: dict[str, Tensor], scale: float, unit: float) -> float:
        products = 0.0  # of no elements: what a slope adds is all there is
        if self.q.numel() and caches["k"].numel():
            norm_k = float(caches["k"].double().nan_to_num().norm(dim=-1).max())
            products = abs(scale) * float(self.q.double().norm(dim=-1).max()) * norm_k
        distance = self.sizes["capacity"] + self.sizes["rows"]
        slopes = [] if self.slopes is None else self.slopes.abs().flatten().tolist()
        slope = max(slopes, default=0.0)
        return (self.q.shape[3] ** 0.5 + 8) * unit * products + 8 * unit * (1 + slope * distance)


def assert_call_is_right(call: Call, options: dict[str, Any]) -> None:
    own = {n: c.clone() for n, c in call.caches.items()}
    wanted = {n: c.clone() for n, c in call.caches.items()}
    out, lse = call.run(own, **options)
    with reference_only():
        call.run(wanted, **options)
    for name in "kv":
        assert_same_bits(own[name], wanted[name], f"{name}_cache")
    exact, exact_lse, magnitude = call.exact(own, options)
    unit = 2.0**-53 if call.dtype == torch.float64 else 2.0**-24
    scale = options.get("softmax_scale")
    ds = call.score_error(own, (call.q.shape[3] or 1) ** -0.5 if scale is None else scale, unit)
    keys = call.sizes["capacity"]
    assert out.dtype == call.dtype
    kind = torch.finfo(call.dtype)
    once = 1.01 * kind.eps / 2 * exact.abs().clamp(min=kind.smallest_normal)
    # Products of bfloat16 have P rounded.
    is_narrow = call.dtype == torch.bfloat16 and _C.cpu_isa() == "avx512_bf16"
    rounded = 1.01 * kind.eps / 2 if is_narrow else 0.0
    bound = once + magnitude * (2 * ds + (keys**0.5 + 8) * unit + rounded)
    # What float64 is compared with was computed in it too, with errors of its own.
    sides = 2 if call.dtype == torch.float64 else 1
    assert ((out.double() - exact).abs() <= sides * bound).all()
    seen = exact_lse.isfinite()
    assert (lse[~seen] == -math.inf).all()
    error = (lse.double() - exact_lse)[seen].abs()
    assert (error <= sides * (ds + 8 * unit * (1 + exact_lse[seen].abs()))).all()


@st.composite
def calls(draw: st.DrawFn) -> tuple[Call, dict[str, Any], str]:
    capacity = draw(st.sampled_from(CAPACITIES))
    sizes = {
        "batch": draw(st.sampled_from([0, 1, 2, 3])),
        "rows": draw(st.sampled_from(ROWS)),
        "new": min(capacity, draw(st.sampled_from([0, 1, 3, 20]))),
        "capacity": capacity,
        "page": draw(st.sampled_from([1, 3, 16, 64, 100, 256])),
        "kv_heads": draw(st.sampled_from([1, 2, 3, 9])),
        "group": draw(st.sampled_from([1, 2, 4, 13])),
        "dim": draw(st.sampled_from(DIMS)),
        "value_dim": draw(st.sampled_from(DIMS)),
    }
    words = ["pages", "entries", "leftpad", "rotary", "interleaved", "slopes", "sink", "int32"]
    form = draw(st.sets(st.sampled_from([*words, "heads first", "every second"])))
    call = Call(draw(st.integers(0, 2**31)), draw(st.sampled_from(DTYPES)), sizes, form)
    limit = st.sampled_from([-1, 0, 1, 7, 200])
    options: dict[str, Any] = {
        "causal": draw(st.booleans()),
        "window_size": draw(st.tuples(limit, limit)) if draw(st.booleans()) else (-1, -1),
        "softcap": draw(st.sampled_from([0.0, 0.0, 2.0])),
        "softmax_scale": draw(st.sampled_from([None, None, 0.3, -0.2, 0.0])),
        "num_splits": draw(st.sampled_from([0, 1, 5])),
    }
    return call, options, draw(st.sampled_from(ISAS)) if ISAS else ""


@settings(max_examples=80, deadline=None)
@given(calls())
def test_any_call(drawn: tuple[Call, dict[str, Any], str]) -> None:
    call, options, isa = drawn
    with running_on(isa):
        assert_call_is_right(call, options)


SIZES = {"batch": 2, "rows": 1, "new": 1, "capacity": 1400, "page": 16, "kv_heads": 2, "group": 4,
         "dim": 64, "value_dim": 64}  # fmt: skip


def sorted_words(words: set[str]) -> str:
    """An id that every process gives a set, in whatever order it holds it."""
    return " ".join(sorted(words))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "form", [{"heads first", "long"}, {"pages", "rotary", "long"}], ids=sorted_words
)
def test_long_caches(isa: str, dtype: torch.dtype, form: set[str]) -> None:
    """More than one split of the keys, of every instruction set."""
    with running_on(isa):
        assert_call_is_right(Call(5, dtype, SIZES, form), {"causal": True, "window_size": (-1, -1)})


@pytest.mark.parametrize("rows", [1, 13], ids=["streamed", "packed"])
@pytest.mark.parametrize("page", [16, 64, 100])
def test_results_do_not_depend_on_threads_or_pages(rows: int, page: int) -> None:
    options = {"causal": True, "window_size": (-1, -1)}
    call = Call(3, torch.bfloat16, SIZES | {"rows": rows, "page": page}, {"pages"})
    flat = Call(3, torch.bfloat16, SIZES | {"rows": rows}, set())
    for b in range(2):
        for name in "kv":
            flat.new[name] = call.new[name]
            length = range(int(call.lengths[b]))
            flat.caches[name][flat.places(b, length)] = call.caches[name][call.places(b, length)]
    flat.q, flat.lengths = call.q, call.lengths
    results = []
    for count in (1, 2, 3):
        with threads(count):
            for each in (call, flat):
                own = {n: c.clone() for n, c in each.caches.items()}
                results.append(each.run(own, **options))
    for out, lse in results[1:]:
        assert_same_bits(out, results[0][0], "out")
        assert_same_bits(lse, results[0][1], "lse")


def test_an_entry_alone_is_the_entry_in_a_batch() -> None:
    call = Call(4, torch.float32, SIZES | {"batch": 3, "new": 0}, set())
    out, _ = call.run(call.caches, window_size=(-1, -1))
    for b in range(3):
        alone = flash_attn_with_kvcache(
            call.q[b : b + 1],
            call.caches["k"][b : b + 1],
            call.caches["v"][b : b + 1],
            cache_seqlens=call.lengths[b : b + 1],
        )
        assert_same_bits(alone, out[b : b + 1], f"entry {b}")


@pytest.mark.parametrize("rows", [3, 70], ids=["streamed", "packed"])
def test_nan_in_a_hidden_key_stays_hidden(rows: int) -> None:
    """The newest key is seen by the last row alone, the one before by the last two."""
    call = Call(6, torch.float32, SIZES | {"rows": rows, "capacity": 200, "new": 0}, {"pages"})
    assert call.table is not None
    call.lengths[:] = 200
    generator = torch.Generator().manual_seed(0)
    for name in "kv":
        cache = torch.randn(call.caches[name].shape, generator=generator)
        for b, table in enumerate(torch.arange(2 * 13).view(2, 13)):
            call.table[b] = table
            cache[call.places(b, range(199, 200))] = math.nan
        call.caches[name] = cache
    out, lse = call.run(call.caches, causal=True)
    assert out[:, -1].isnan().all()
    assert lse[..., -1].isnan().all()
    assert out[:, :-1].isfinite().all()
    assert lse[..., :-1].isfinite().all()


@pytest.mark.parametrize("rows", [1, 20], ids=["streamed", "packed"])
def test_pages_may_begin_behind_padding(rows: int) -> None:
    """The op takes left padding with a table, as its reference does."""
    generator = torch.Generator().manual_seed(2)
    q = torch.randn(2, rows, 4, 16, generator=generator)
    k_cache, v_cache = (torch.randn(20, 7, 2, 16, generator=generator) for _ in "kv")
    table = torch.randperm(20, generator=generator).view(2, 10)
    table[1, 0] = -3  # all of it is padding
    args = (q, k_cache, v_cache, *(None,) * 4, torch.tensor([50, 64]), None, torch.tensor([3, 9]),
            table, None, None, True, 0.25, -1, 0, False, 0.0)  # fmt: skip
    out, lse = torch.ops.mcp_kernels.flash_attn_kvcache(*args)
    for b, (start, stop) in enumerate(((3, 50), (9, 64))):
        at = torch.arange(start, stop)
        keys, values = (c[table[b, at // 7], at % 7][None] for c in (k_cache, v_cache))
        exact, exact_lse = naive_attention(
            q[b : b + 1], keys, values, softmax_scale=0.25, causal=True
        )
        # Scores of 16 products of normal numbers stay below 10 and so within 1e-5 of exact.
        torch.testing.assert_close(out[b : b + 1].double(), exact, rtol=0, atol=3e-5)
        torch.testing.assert_close(lse[b : b + 1].double(), exact_lse, rtol=0, atol=3e-5)


def test_which_backend_names_the_instruction_set() -> None:
    q, cache = torch.zeros(1, 1, 2, 8), torch.zeros(1, 4, 2, 8)
    choice = which_backend(flash_attn_with_kvcache, q, cache, cache)
    assert choice.op == "flash_attn_kvcache"
    assert choice.chosen == f"cpu:{_C.cpu_isa()}"


@pytest.mark.parametrize("page", [-1, 6])
@pytest.mark.parametrize("column", [0, 1])
def test_a_page_out_of_range_is_named_and_nothing_is_written(page: int, column: int) -> None:
    table = torch.tensor([[0, 1, -5], [2, 3, 99]])
    table[1, column] = page
    k_cache, v_cache = torch.zeros(6, 4, 1, 8), torch.zeros(6, 4, 1, 8)
    new = torch.ones(2, 1, 1, 8)
    match = rf"block_table must name pages in \[0, 5\].*got {page} in row 1, column {column}"
    with pytest.raises(ValueError, match=match):
        flash_attn_with_kvcache(
            torch.zeros(2, 1, 1, 8), k_cache, v_cache, new, new, cache_seqlens=5, block_table=table
        )
    assert not k_cache.any()
    assert not v_cache.any()


def test_the_op_holds_its_own_contract() -> None:
    """torch.ops callers pass by the checks of the public function."""
    op = torch.ops.mcp_kernels.flash_attn_kvcache
    q, k_cache, v_cache = torch.zeros(2, 1, 2, 8), torch.zeros(2, 4, 1, 8), torch.zeros(2, 4, 1, 8)
    tail = (None, None, True, 1.0, -1, -1, False, 0.0)
    lengths = torch.tensor([1, 4])
    nothing = (None,) * 4

    def call(*head: Any) -> None:
        op(*head, *tail)

    call(q, k_cache, v_cache, *nothing, lengths, None, None, None)
    with pytest.raises(RuntimeError, match="v must be 4 in dimension 1, got 3"):
        call(q, k_cache, v_cache[:, :3], *nothing, lengths, None, None, None)
    with pytest.raises(ValueError, match=r"cache_seqlens must be \[2\], got 1 elements"):
        call(q, k_cache, v_cache, *nothing, lengths[:1], None, None, None)
    with pytest.raises(ValueError, match="k_cache must hold entry 2 with 1 keys, got 2 entries"):
        call(q, k_cache, v_cache, *nothing, lengths, torch.tensor([2, 0]), None, None)
    new, angles = torch.zeros(2, 1, 1, 8, dtype=torch.float64), torch.zeros(3, 4)
    with pytest.raises(RuntimeError, match="k must have dtype code"):
        call(q, k_cache, v_cache, new, new, None, None, lengths, None, None, None)
    with pytest.raises(ValueError, match="rotary_cos must have 4 positions, got 3"):
        call(
            q, k_cache, v_cache, new.float(), new.float(), angles, angles, lengths - 1, *nothing[:3]
        )
