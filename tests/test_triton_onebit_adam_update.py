"""The Triton body of onebit_adam_update: the reference's bits, cubins for each GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from bodies import running_on
from test_onebit_adam_update import DTYPES, LR, STEP_SIZE, Case
from triton_codecs import DEVICE, assert_equal, compile_for, on_device

from mcp_kernels.triton import onebit_adam_update as body


@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("dtypes", [None, DTYPES])
@pytest.mark.parametrize("block_size", [8, 64, 1024])
def test_bits_equal_the_reference(block_size, dtypes, strided):
    mode = {"divides": block_size == 8 or strided, "masked": not strided}
    if dtypes and DEVICE == "cpu":
        dtypes = [torch.float32, torch.float16]  # the interpreter cuts bfloat16 instead of rounding
    case = Case([9, 0, 33, 1500, 1], block_size, dtypes=dtypes, strided=strided, **mode)
    with running_on("reference"):
        expected = case.run()
    params = on_device(*case.params)
    if strided:
        params = [torch.stack((p, p), dim=1)[:, 1] for p in params]
    denom, bits, scales = on_device(case.denom, case.bits, case.scales)
    master, moves = on_device(case.master, case.moves)
    body.onebit_adam_update(
        *(params, denom, bits, scales, LR, STEP_SIZE, case.weight_decays, block_size),
        *(master, moves),
    )
    assert_equal([*params, *([] if master is None else [master])], expected)


CUBINS = """
from mcp_kernels.triton import onebit_adam_update as body
for param in ("*fp32", "*bf16", "*fp16"):
    pointers = dict(param_ptr=param, weight_ptr="*fp32", denom_ptr="*fp32", moves_ptr="*u8",
                    bits_ptr="*u8", scales_ptr="*fp32")
    divides = param != "*bf16"
    text = ptx(body._onebit_adam_update_kernel, pointers,
               {"HAS_MASTER": True, "DIVIDES": divides, "IS_MASKED": not divides,
                "ELEMENTS": body.ELEMENTS_PER_PROGRAM},
               floats=("decay", "step_size"))
    assert ("div.rn.f32" in text) == divides, text
    assert param == "*fp32" or "cvt.rn." in text, text
"""


@pytest.mark.parametrize("arch", [pytest.param(80, marks=pytest.mark.slow), 90])
def test_compiles_for_gpus_without_one(arch, tmp_path):
    compile_for(arch, CUBINS, tmp_path)
