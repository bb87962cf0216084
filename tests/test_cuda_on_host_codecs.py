"""The codecs' CUDA kernels without a GPU: the same source, 32 coroutines a warp, equal bits."""

from __future__ import annotations

import ctypes
import subprocess
from ctypes import POINTER, Structure, byref, c_float, c_int, c_int64, c_void_p
from pathlib import Path

import pytest
import torch
from bodies import running_on
from codec_cases import ReduceCase
from native import find_compiler
from test_fp8_compress import TestFp8 as Fp8
from test_int4_compress import TestInt4 as Int4
from test_int8_compress import TestInt8 as Int8
from test_onebit_adam_update import LR, STEP_SIZE
from test_onebit_adam_update import Case as AdamCase
from test_onebit_compress_momentum import BETA1, GRAD_SCALE
from test_onebit_compress_momentum import Case as MomentumCase
from test_onebit_reduce import Case as OnebitReduceCase

from mcp_kernels.testing import assert_same_bits, make_gradient, make_hostile

ROOT = Path(__file__).resolve().parent.parent
COMPILER, NO_COMPILER = find_compiler()
pytestmark = pytest.mark.skipif(COMPILER is None, reason=NO_COMPILER or "no compiler")

FLOAT_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
DTYPES = list(FLOAT_TYPES)
CODECS = {"int8": (0, Int8.codec), "int4": (1, Int4.codec), "fp8": (2, Fp8.codec)}


def fields(*pairs):
    """A ctypes struct of one of the kernels' headers."""
    return type("Args", (Structure,), {"_fields_": list(pairs)})


Grad = fields(("grad", c_void_p), ("type", c_int), ("numel", c_int64), ("first_block", c_int64))
MomentumArgs = fields(
    *(("grads", POINTER(Grad)), ("num_grads", c_int64), ("preconditioner", c_void_p)),
    *(
        ("old_bits", c_void_p),
        ("old_scales", c_void_p),
        ("error", c_void_p),
        ("bits", c_void_p),
        ("scales", c_void_p),
    ),
    *(("beta1", c_float), ("one_minus_beta1", c_float), ("grad_scale", c_float)),
    *(("num_blocks", c_int64), ("block_size", c_int64)),
)
ReduceArgs = fields(
    *(("rank_codes", c_void_p), ("rank_scales", c_void_p), ("num_ranks", c_int64)),
    *(("counts", c_void_p), ("error", c_void_p), ("codes", c_void_p), ("scales", c_void_p)),
    *(("numel", c_int64), ("block_size", c_int64)),
)
Param = fields(
    *(("param", c_void_p), ("type", c_int), ("decay", c_float)),
    *(("numel", c_int64), ("first_block", c_int64)),
)
AdamArgs = fields(
    *(("params", POINTER(Param)), ("num_params", c_int64), ("master", c_void_p)),
    *(("denom", c_void_p), ("moves", c_void_p), ("bits", c_void_p), ("scales", c_void_p)),
    *(("step_size", c_float), ("block_size", c_int64)),
)
CompressArgs = fields(
    *(("x", c_void_p), ("x_type", c_int), ("error", c_void_p), ("codes", c_void_p)),
    *(("scales", c_void_p), ("numel", c_int64), ("block_size", c_int64)),
)
DecompressArgs = fields(
    *(("codes", c_void_p), ("scales", c_void_p), ("x", c_void_p)),
    *(("numel", c_int64), ("block_size", c_int64)),
)


def build(folder, name):
    """The host build of one file of kernels."""
    library = folder / f"{name}.so"
    source = ROOT / "tests" / "cuda_on_host" / f"{name}.cpp"
    flags = ["-O1", "-std=c++17", "-fPIC", "-shared", "-ffp-contract=off", "-Wno-unknown-pragmas"]
    # A GPU faults on a store that a host CPU forgives.
    flags += ["-fsanitize=alignment,bounds,shift"]
    command = [*COMPILER, *flags, f"-I{ROOT / 'csrc'}", str(source), "-o", str(library)]
    answer = subprocess.run(command, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    return ctypes.CDLL(str(library))


@pytest.fixture(scope="module")
def step(tmp_path_factory):
    return build(tmp_path_factory.mktemp("host"), "onebit_step")


@pytest.fixture(scope="module")
def scaled(tmp_path_factory):
    return build(tmp_path_factory.mktemp("host"), "scaled_codec")


@pytest.fixture(autouse=True)
def no_undefined_behaviour(capfd):
    yield
    assert "runtime error" not in capfd.readouterr().err


def assert_equal(actual, expected):
    for number, (got, want) in enumerate(zip(actual, expected, strict=True)):
        assert_same_bits(got, want, f"output {number}")


def poisoned(shape, dtype):
    return torch.full(shape, 0xAA if dtype == torch.uint8 else float("nan"), dtype=dtype)


def address(tensor):
    return None if tensor is None else tensor.data_ptr()


def items_of(tensors, layout, make):
    """The table of a launch: empty tensors own no block and have no entry."""
    rows = [
        make(tensor, at // layout.block_size, index)
        for index, (tensor, at) in enumerate(zip(tensors, layout.offsets, strict=True))
        if tensor.numel()
    ]
    kind = type(rows[0]) if rows else Grad
    return (kind * max(1, len(rows)))(*rows), len(rows)


def run_momentum(step, case):
    error, bits = case.error.clone(), poisoned(case.bits.shape, torch.uint8)
    scales = poisoned(case.scales.shape, torch.float32)
    table, count = items_of(
        case.grads,
        case.layout,
        lambda g, block, _: Grad(g.data_ptr(), FLOAT_TYPES[g.dtype], g.numel(), block),
    )
    pointers = (t.data_ptr() for t in (case.bits, case.scales, error, bits, scales))
    args = MomentumArgs(
        *(table, count, address(case.preconditioner), *pointers),
        *(BETA1, 1 - BETA1, GRAD_SCALE),
        *(scales.numel(), case.block_size),
    )
    step.onebit_compress_momentum(byref(args))
    return bits, scales, error


@pytest.mark.parametrize("hostile", [False, True])
@pytest.mark.parametrize("block_size", [8, 40, 64, 1024, 2048])
def test_momentum_gives_the_reference_s_bits(step, block_size, hostile):
    sizes = [9, 0, 33, 1000, 2500] if block_size > 8 else [9, 0, 33]
    how = {"hostile": hostile, "preconditioned": not hostile}
    case = MomentumCase(sizes, block_size, dtypes=DTYPES, spare_blocks=3, **how)
    case.grads[-1][7] = float("inf") if hostile else 1.0
    with running_on("reference"):
        expected = case.run()
    assert_equal(run_momentum(step, case), expected)


def test_momentum_of_no_tensor_is_padding(step):
    case = MomentumCase([], 64, spare_blocks=9)
    with running_on("reference"):
        expected = case.run()
    assert_equal(run_momentum(step, case), expected)


def run_reduce(call, case, codes, num_bytes):
    error, out = case.error.clone(), poisoned((num_bytes,), torch.uint8)
    scales = poisoned((case.scales.shape[1],), torch.float32)
    counts = None if case.counts is None else case.counts.data_ptr()
    args = ReduceArgs(
        *(codes.data_ptr(), case.scales.data_ptr(), codes.shape[0], counts),
        *(error.data_ptr(), out.data_ptr(), scales.data_ptr(), error.numel(), case.block_size),
    )
    call(byref(args))
    return out, scales, error


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("numel, block_size", [(9, 8), (1000, 24), (3000, 1024), (1500, 2048)])
def test_reduce_gives_the_reference_s_bits(step, numel, block_size, world_size, counted):
    case = OnebitReduceCase(numel, block_size, world_size, counted=counted)
    case.scales[-1, -1] = float("nan")
    with running_on("reference"):
        expected = case.run()
    actual = run_reduce(step.onebit_reduce, case, case.bits, case.bits.shape[1])
    assert_equal(actual, expected)


@pytest.mark.parametrize("divides", [True, False])
@pytest.mark.parametrize("dtypes", [None, DTYPES])
@pytest.mark.parametrize("block_size", [8, 64, 1024])
def test_adam_gives_the_reference_s_bits(step, block_size, dtypes, divides):
    how = {"dtypes": dtypes, "divides": divides, "masked": not divides}
    case = AdamCase([9, 0, 33, 1500], block_size, **how)
    with running_on("reference"):
        expected = case.run()
    params = [p.clone() for p in case.params]
    master = None if case.master is None else case.master.clone()
    table, count = items_of(
        params,
        case.layout,
        lambda p, block, index: Param(
            *(p.data_ptr(), FLOAT_TYPES[p.dtype], 1 - LR * case.weight_decays[index]),
            *(p.numel(), block),
        ),
    )
    args = AdamArgs(
        *(table, count, address(master), address(case.denom), address(case.moves)),
        *(case.bits.data_ptr(), case.scales.data_ptr()),
        *(STEP_SIZE, block_size),
    )
    step.onebit_adam_update(byref(args), c_int64(case.layout.num_blocks))
    assert_equal([*params, *([] if master is None else [master])], expected)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel, block_size", [(1, 8), (9, 8), (1000, 24), (3000, 1024)])
def test_scaled_compress_gives_the_reference_s_bits(scaled, codec, dtype, numel, block_size):
    number, naive = CODECS[codec]
    largest = torch.finfo(dtype).max / 8
    x = make_hostile(numel, seed=1).clamp(-largest, largest).to(dtype)
    x[-1] = float("nan") if numel == 1000 else 1.0
    error = make_gradient(numel, seed=2)
    expected_error = error.clone()
    with running_on("reference"):
        codes, scales = naive.op("compress")(x, expected_error, block_size)
        values = naive.op("decompress")(codes, scales, numel, block_size)
    out, out_scales = poisoned(codes.shape, torch.uint8), poisoned(scales.shape, torch.float32)
    pointers = (t.data_ptr() for t in (error, out, out_scales))
    args = CompressArgs(x.data_ptr(), FLOAT_TYPES[dtype], *pointers, numel, block_size)
    scaled.scaled_compress(number, byref(args))
    assert_equal((out, out_scales, error), (codes, scales, expected_error))

    rebuilt = poisoned((numel,), torch.float32)
    pointers = (t.data_ptr() for t in (codes, scales, rebuilt))
    scaled.scaled_decompress(number, byref(DecompressArgs(*pointers, numel, block_size)))
    assert_equal((rebuilt,), (values,))


@pytest.mark.parametrize("codec", CODECS)
def test_every_code_is_read_alike(scaled, codec):
    number, naive = CODECS[codec]
    codes, scales = torch.arange(256, dtype=torch.uint8), torch.full((2,), 0.37)
    numel = 256 * 8 // naive.bits_each
    with running_on("reference"):
        values = naive.op("decompress")(codes, scales, numel, numel // 2)
    rebuilt = poisoned((numel,), torch.float32)
    pointers = (t.data_ptr() for t in (codes, scales, rebuilt))
    scaled.scaled_decompress(number, byref(DecompressArgs(*pointers, numel, numel // 2)))
    assert_equal((rebuilt,), (values,))


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("numel, block_size", [(9, 8), (1001, 24), (1500, 1024)])
def test_scaled_reduce_gives_the_reference_s_bits(scaled, codec, numel, block_size, counted):
    number, naive = CODECS[codec]
    case = ReduceCase(naive, numel, block_size, 3, 0, counted)
    case.scales[1, -1] = float("inf")
    with running_on("reference"):
        expected = case.run()

    def call(args):
        scaled.scaled_reduce(number, args)

    assert_equal(run_reduce(call, case, case.codes, case.codes.shape[1]), expected)
