"""The tests that int8, int4 and fp8 share: each against numpy's view of its definition."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from bodies import on_every_path, running_on
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import mcp_kernels
from mcp_kernels.testing import assert_same_bits, make_gradient, make_hostile

SIZES = [1, 7, 8, 9, 31, 32, 33, 63, 64, 65, 1000, 5003]
BLOCK_SIZES = [8, 24, 64, 1024, 1 << 40]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@dataclass(frozen=True)
class NaiveCodec:
    """A codec as a table: what each code means, and how a byte array holds codes."""

    name: str
    bits_each: int
    meaning: np.ndarray
    """[2 ** bits] float64, NaN where a code means nothing."""

    @property
    def largest(self):
        return np.nanmax(self.legal)

    @property
    def legal(self):
        """Codes that compress may give: int8's -128 and int4's -8 are not among them."""
        return np.where(self.meaning < -np.nanmax(self.meaning), np.nan, self.meaning)

    def unpack(self, packed, numel):
        if self.bits_each == 8:
            return packed
        return np.stack((packed & 15, packed >> 4), axis=-1).reshape(*packed.shape[:-1], -1)[
            ..., :numel
        ]

    def nearest(self, units):
        """Values of the codes nearest to ``units``; a tie goes to the even code."""
        order = np.argsort(self.legal, kind="stable")[: np.isfinite(self.legal).sum()]
        values = self.legal[order]
        right = np.clip(np.searchsorted(values, units), 1, len(values) - 1)
        low, high = values[right - 1], values[right]
        middle = (low + high) / 2
        even_is_low = order[right - 1] % 2 == 0
        take_low = (units < middle) | ((units == middle) & even_is_low)
        return np.where(take_low, low, high)

    def op(self, what):
        return getattr(mcp_kernels, f"{self.name}_{what}")


def compress(codec, x, error, block_size):
    """(codes, scales, new error); ``error`` itself is left alone."""
    new_error = error.clone()
    codes, scales = codec.op("compress")(x, new_error, block_size)
    return codes, scales, new_error


def assert_codes_are(codec, carried, result, block_size, counts=None):
    """Scales, codes and errors of float32 ``carried`` follow the definition; finite values only."""
    codes, scales, error = (t.numpy() for t in result)
    values = codec.meaning[codec.unpack(codes, carried.size)]
    for block in range(len(scales)):
        end = min((block + 1) * block_size, carried.size)
        count = end - block * block_size if counts is None else int(counts[block])
        span = slice(block * block_size, block * block_size + count)
        amax = np.abs(carried[span]).max(initial=np.float32(0))
        assert scales[block] == amax / np.float32(codec.largest)
        if scales[block]:
            units = np.clip(carried[span] / scales[block], -codec.largest, codec.largest)
            np.testing.assert_array_equal(values[span], codec.nearest(units.astype(np.float64)))
        else:
            np.testing.assert_array_equal(values[span], 0)
        sent = values[span].astype(np.float32) * scales[block]
        np.testing.assert_array_equal(error[span], carried[span] - sent)
        assert not values[span.stop : end].any()


def carried_of(x, error):
    return x.float().numpy().ravel() + error.numpy().ravel()


class CodecTests:
    """Subclass with ``codec``; pytest runs these for it."""

    codec: NaiveCodec

    @pytest.mark.parametrize("numel", SIZES)
    def test_codes_scales_and_error_follow_the_definition(self, numel):
        for block_size in BLOCK_SIZES:
            x, error = make_gradient(numel, seed=1), make_gradient(numel, seed=2)
            result = on_every_path(lambda: compress(self.codec, x, error, block_size))  # noqa: B023
            assert_codes_are(self.codec, carried_of(x, error), result, block_size)

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("block_size", [8, 1024])
    def test_hostile_values_and_narrow_inputs(self, dtype, block_size):
        largest = torch.finfo(dtype).max / 8
        x = make_hostile(3001, seed=6).clamp(-largest, largest).to(dtype)
        error = make_hostile(3001, seed=7).clamp(-1e37, 1e37)
        result = on_every_path(lambda: compress(self.codec, x, error, block_size))
        assert_codes_are(self.codec, carried_of(x, error), result, block_size)

    def test_halves_are_rounded_to_even(self):
        """Units between two codes, and a step to each side of it, in a block of scale 1."""
        legal = np.sort(self.codec.legal[np.isfinite(self.codec.legal)])
        middle = ((legal[1:] + legal[:-1]) / 2).astype(np.float32)
        around = [np.nextafter(middle, np.float32(s)) for s in (-9e9, 9e9)]
        units = np.concatenate([middle, *around, [np.float32(self.codec.largest)]])
        x = torch.from_numpy(units.astype(np.float32))
        result = on_every_path(lambda: compress(self.codec, x, torch.zeros(len(x)), 1 << 20))
        assert result[1].item() == 1.0
        assert_codes_are(self.codec, x.numpy(), result, 1 << 20)

    def test_blocks_too_small_for_a_scale_keep_their_values(self):
        tiny = 2.0**-149
        x = torch.tensor([tiny, -tiny, 0.0, -0.0, tiny, tiny, tiny, tiny] + [90 * tiny] * 8)
        result = on_every_path(lambda: compress(self.codec, x, torch.zeros(16), 8))
        assert_codes_are(self.codec, x.numpy(), result, 8)
        assert result[1][0] == 0
        np.testing.assert_array_equal(result[2][:8].numpy(), x[:8].numpy())

    @pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf"), 3e38])
    @pytest.mark.parametrize("at", [0, 255])
    def test_a_block_that_is_not_finite_says_so_and_keeps_its_error(self, bad, at):
        x, error = make_gradient(768, seed=8), make_gradient(768, seed=9)
        x[256 + at] = bad
        error[256 + at] = abs(bad) if bad > 1e38 else 0.0  # the sum overflows
        codes, scales, new_error = on_every_path(lambda: compress(self.codec, x, error, 256))
        assert scales.isnan().tolist() == [False, True, False]
        assert_same_bits(new_error[256:512], error[256:512])
        assert not self.codec.unpack(codes.numpy(), 768)[256:512].any()
        assert new_error[:256].isfinite().all()

    def test_the_largest_value_gives_no_infinity(self):
        x = make_gradient(64)
        x[3] = torch.finfo(torch.float32).max
        _, scales, error = on_every_path(lambda: compress(self.codec, x, torch.zeros(64), 64))
        assert error.isfinite().all()
        sent = np.float32(self.codec.largest) * scales.numpy()
        assert np.isfinite(sent).all() or scales.isnan().all()

    @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        numel=st.integers(0, 3000),
        block_size=st.sampled_from([8, 16, 40, 64, 256, 1024, 4096, 1 << 40]),
        dtype=st.sampled_from(DTYPES),
        seed=st.integers(0, 2**31),
        hostile=st.booleans(),
        bad=st.sampled_from([None, float("nan"), float("inf")]),
        world_size=st.integers(1, 6),
        counted=st.booleans(),
    )
    def test_any_case_has_equal_bits_everywhere(
        self, numel, block_size, dtype, seed, hostile, bad, world_size, counted
    ):
        make = make_hostile if hostile else make_gradient
        x, error = make(numel, seed=seed).to(dtype), make_gradient(numel, seed=seed + 1)
        if bad is not None and numel:
            x[numel // 2] = bad
        codes, scales, _ = on_every_path(lambda: compress(self.codec, x, error, block_size))
        on_every_path(lambda: (self.codec.op("decompress")(codes, scales, numel, block_size),))
        case = ReduceCase(self.codec, numel, min(block_size, 4096), world_size, seed, counted)
        if bad is not None and numel:
            case.scales[-1, 0] = bad
        on_every_path(case.run)

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("bad", [None, float("nan"), float("-inf")])
    def test_quantize_is_compress_without_an_error(self, dtype, bad):
        for numel in (0, *SIZES):
            x = make_hostile(numel, seed=numel).to(dtype)
            if bad is not None and numel:
                x[numel // 2] = bad
            for block_size in BLOCK_SIZES:
                got = on_every_path(lambda: self.codec.op("quantize")(x, block_size))  # noqa: B023
                want = compress(self.codec, x, torch.zeros(numel), block_size)
                for one, other in zip(got, want[:2], strict=True):
                    assert_same_bits(one, other)
        strided = make_gradient(6000, dtype=dtype).view(60, 100).t()
        for one, other in zip(
            self.codec.op("quantize")(strided, 64),
            self.codec.op("quantize")(strided.contiguous(), 64),
            strict=True,
        ):
            assert_same_bits(one, other)

    @pytest.mark.parametrize("numel", SIZES)
    def test_decompress_is_the_table_times_the_scale(self, numel):
        for block_size in BLOCK_SIZES:
            generator = np.random.default_rng(numel)
            num_bytes = -(-numel * self.codec.bits_each // 8)
            codes = generator.integers(0, 256, num_bytes, dtype=np.uint8)
            scales = generator.random(-(-numel // block_size), dtype=np.float32)
            given = (torch.from_numpy(codes), torch.from_numpy(scales), numel, block_size)

            def both(given=given):
                there = torch.full((given[2],), torch.nan)
                into = getattr(torch.ops.mcp_kernels, f"{self.codec.name}_decompress_into")
                into(given[0], given[1], given[3], there)
                return self.codec.op("decompress")(*given), there

            x, there = on_every_path(both)
            assert_same_bits(there, x)
            units = self.codec.meaning[self.codec.unpack(codes, numel)].astype(np.float32)
            want = units * scales[np.arange(numel) // block_size]
            np.testing.assert_array_equal(x.numpy(), want)

    def test_every_code_is_read_alike_and_a_bad_scale_gives_nan(self):
        codes = torch.arange(256, dtype=torch.uint8).repeat(3)
        numel = codes.numel() * 8 // self.codec.bits_each
        scales = torch.tensor([0.37, float("nan"), float("inf")])
        block = numel // 3
        (x,) = on_every_path(lambda: (self.codec.op("decompress")(codes, scales, numel, block),))
        assert x[block:].isnan().all()
        meaning = self.codec.meaning[self.codec.unpack(codes.numpy(), numel)[:block]]
        np.testing.assert_array_equal(
            x[:block].numpy(), meaning.astype(np.float32) * np.float32(0.37)
        )

    @pytest.mark.parametrize("counted", [False, True])
    @pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6])
    def test_reduce_is_the_mean_coded_again(self, world_size, counted):
        for numel in SIZES:
            case = ReduceCase(self.codec, numel, 64, world_size, numel, counted)
            codes, scales, error = on_every_path(case.run)
            carried = case.carried()
            assert_codes_are(self.codec, carried, (codes, scales, error), 64, case.counts)
            padding = ~case.valid
            np.testing.assert_array_equal(error[padding].numpy(), case.error[padding].numpy())

    def test_nothing_is_lost_over_many_steps(self):
        for path in ("reference", "best"):
            error, sent, total, size = (torch.zeros(1000, dtype=torch.float64) for _ in range(4))
            error = error.float()
            with running_on(path) if path == "reference" else torch.no_grad():
                for step in range(30):
                    x = make_gradient(1000, seed=step)
                    codes, scales = self.codec.op("compress")(x, error, 256)
                    back = self.codec.op("decompress")(codes, scales, 1000, 256)
                    sent, total = sent + back, total + x
                    size += x.abs() + 2 * error.abs() + back.abs()
            # Two roundings a step, half an ulp of the result each, and error * 0.5 ulp on the way.
            assert ((sent + error - total).abs() <= 2**-23 * size + 1e-30).all()

    def test_strides_are_read_in_logical_order(self):
        base = make_gradient(6000, seed=10, dtype=torch.bfloat16)
        for view in (base.view(60, 100).t(), base[::3], base[:1].expand(77), base[7:]):
            error = make_gradient(view.numel(), seed=11)
            got = on_every_path(lambda: compress(self.codec, view, error, 64))  # noqa: B023
            flat = view.contiguous().view(-1)
            want = on_every_path(lambda: compress(self.codec, flat, error, 64))  # noqa: B023
            for one, other in zip(got, want, strict=True):
                assert_same_bits(one, other)

    def test_x_may_be_the_error_itself(self):
        start = make_gradient(3000, seed=12)
        expected = on_every_path(lambda: compress(self.codec, start, start, 1024))

        def in_place():
            shared = start.clone()
            return (*self.codec.op("compress")(shared, shared), shared)

        for got, want in zip(on_every_path(in_place), expected, strict=True):
            assert_same_bits(got, want)

    @pytest.mark.parametrize("path", ["reference", "best"])
    @pytest.mark.parametrize("numel", [0, 101])
    def test_opcheck(self, path, numel):
        x, error = make_gradient(numel), make_gradient(numel, seed=1)
        case = ReduceCase(self.codec, numel, 64, 2, 0, False)
        ops = torch.ops.mcp_kernels
        with running_on(path) if path == "reference" else torch.no_grad():
            codes, scales, _ = compress(self.codec, x, error, 64)
            for what, args in {
                "compress": (x, error, 64),
                "decompress": (codes, scales, numel, 64),
                "quantize": (x, 64),
                "decompress_into": (codes, scales, 64, torch.empty(numel)),
                "reduce": (case.codes, case.scales, case.error, None, 64),
            }.items():
                torch.library.opcheck(getattr(ops, f"{self.codec.name}_{what}").default, args)

    def test_refuses_in_words(self):
        x, name = torch.zeros(16), self.codec.name
        codes, scales, _ = compress(self.codec, x, torch.zeros(16), 8)
        compress_op, decompress_op, quantize_op, reduce_op = (
            self.codec.op(what) for what in ("compress", "decompress", "quantize", "reduce")
        )
        refused = [
            (compress_op, (x, x, 12), ValueError, "block_size must be a positive multiple of 8"),
            (compress_op, (x.double(), x), TypeError, "x must be float32, bfloat16 or float16"),
            (compress_op, (x, x[:8]), ValueError, "error must be as large as x (16 elements)"),
            (decompress_op, (codes, scales, 99, 8), ValueError, "codes must be"),
            (decompress_op, (codes, scales[:1], 16, 8), ValueError, "scales must be 2 values"),
            (decompress_op, (codes.int(), scales, 16, 8), TypeError, "codes must be torch.uint8"),
            (quantize_op, (x, 12), ValueError, "block_size must be a positive multiple of 8"),
            (quantize_op, (x.double(), 8), TypeError, "x must be float32, bfloat16 or float16"),
            (reduce_op, (codes, scales, x, None, 8), ValueError, "codes must be [W,"),
            (reduce_op, (codes[None], scales, x, None, 8), ValueError, "scales must be [1, 2]"),
            (reduce_op, (codes[None], scales[None], x[:9], None, 8), ValueError, "codes must be ["),
        ]
        for op, args, kind, message in refused:
            with pytest.raises(kind) as caught:
                op(*args)
            assert str(caught.value).startswith(f"{name}_{op.__name__.split('_')[1]}: {message}")


class ReduceCase:
    """Codes of W ranks and the server's state."""

    def __init__(self, codec, numel, block_size, world_size, seed, counted):
        generator = torch.Generator().manual_seed(seed)
        blocks = -(-numel // block_size)
        self.counts = None
        if counted:
            numel = blocks * block_size
            counts = torch.randint(0, block_size + 1, (blocks,), generator=generator)
            self.counts = counts.int()
        parts = [make_gradient(numel, seed=seed + rank) for rank in range(world_size)]
        coded = [codec.op("compress")(p, torch.zeros(numel), block_size) for p in parts]
        self.codes = torch.stack([codes for codes, _ in coded])
        self.scales = torch.stack([scales for _, scales in coded])
        self.error = make_gradient(numel, seed=seed + 50) / 4
        self.codec, self.block_size = codec, block_size

    def run(self):
        error = self.error.clone()
        result = self.codec.op("reduce")(
            self.codes, self.scales, error, self.counts, self.block_size
        )
        return (*result, error)

    @property
    def valid(self):
        """[C] bool: what is not padding."""
        if self.counts is None:
            return torch.ones_like(self.error, dtype=torch.bool)
        return (torch.arange(self.block_size) < self.counts[:, None]).view(-1)

    def carried(self):
        """float32 u, written apart from ours; 0 in padding."""
        numel = self.error.numel()
        units = self.codec.meaning[self.codec.unpack(self.codes.numpy(), numel)].astype(np.float32)
        scales = self.scales.numpy().repeat(self.block_size, axis=1)[:, :numel]
        total = units[0] * scales[0]
        for rank in range(1, len(units)):
            total = total + units[rank] * scales[rank]
        u = total * np.float32(1 / len(units)) + self.error.numpy()
        return np.where(self.valid.numpy(), u, np.float32(0))
