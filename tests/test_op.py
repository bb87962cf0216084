"""define_op, override, reference_only and which_backend, on small ops defined here."""

from __future__ import annotations

import logging

import pytest
import torch

import mcp_kernels
from mcp_kernels import _op, onebit_compress, reference_only, which_backend

HAS_C = mcp_kernels.build_info().extensions["_C"]
needs_c = pytest.mark.skipif(not HAS_C, reason="the _C extension was not built")
without_c = pytest.mark.skipif(HAS_C, reason="the _C extension was built")


def double_ref(x):
    return x * 2


@pytest.fixture(scope="module")
def test_double():
    """An op with a backward and, on CPU, an override that refuses long inputs."""

    def backward(ctx, grad):
        return grad * 2

    _op.define_op(
        "test_double(Tensor x) -> Tensor",
        reference=double_ref,
        fake=torch.empty_like,
        backward=backward,
        setup_context=lambda ctx, inputs, output: None,
    )
    yield torch.ops.mcp_kernels.test_double
    del _op.definitions["test_double"]


@pytest.fixture(scope="module")
def test_triple():
    """An op whose override on CPU can be told from its reference by the sign of zero."""

    def refuses(x):
        return f"needs at most 4 elements, got {x.numel()}" if x.numel() > 4 else None

    _op.define_op(
        "test_triple(Tensor x) -> Tensor", reference=lambda x: x * 3, fake=torch.empty_like
    )
    _op.override("test_triple", lambda x: x * 3 + 0.5, "CPU", backend="triton", refuses=refuses)
    yield torch.ops.mcp_kernels.test_triple
    del _op.definitions["test_triple"]
    del _op.overrides["test_triple", "CPU"]


def test_the_reference_is_the_op(test_double):
    x = torch.arange(3.0)
    assert test_double(x).tolist() == [0.0, 2.0, 4.0]
    assert test_double(x.to("meta")).shape == (3,)


def test_backward_is_the_formula_given(test_double):
    x = torch.randn(4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(test_double, (x,))
    torch.library.opcheck(test_double.default, (x,))
    with reference_only():
        test_double(x).sum().backward()
    assert x.grad.tolist() == [2.0] * 4


def test_an_override_takes_the_reference_s_place(test_triple):
    x = torch.ones(2)
    assert test_triple(x).tolist() == [3.5, 3.5]
    with reference_only():
        assert test_triple(x).tolist() == [3.0, 3.0]
    assert test_triple(x).tolist() == [3.5, 3.5]
    choice = which_backend("test_triple", x)
    assert choice.chosen == "triton"
    assert "reference_only() runs it" in choice.refused["reference"]


def test_a_refused_call_runs_the_reference_and_says_why_once(test_triple, caplog):
    x = torch.ones(5)
    with caplog.at_level(logging.WARNING):
        assert test_triple(x).tolist() == [3.0] * 5
        test_triple(x)
    (record,) = caplog.records
    assert record.getMessage() == (
        "test_triple: triton refuses (needs at most 4 elements, got 5); the reference runs instead"
    )
    choice = which_backend("mcp_kernels::test_triple", x)
    assert choice.chosen == "reference"
    assert choice.refused["triton"] == "needs at most 4 elements, got 5"


def test_a_body_named_by_module_is_imported_at_the_first_call():
    _op.define_op("test_lazy(Tensor x) -> Tensor", reference=lambda x: x + 1, fake=torch.empty_like)
    _op.override("test_lazy", "colorsys_missing_module:body", "CPU")
    try:
        with pytest.raises(ModuleNotFoundError, match="colorsys_missing_module"):
            torch.ops.mcp_kernels.test_lazy(torch.ones(1))
        with reference_only():
            assert torch.ops.mcp_kernels.test_lazy(torch.ones(1)).item() == 2
    finally:
        del _op.definitions["test_lazy"]
        del _op.overrides["test_lazy", "CPU"]


def test_reference_only_leaves_other_ops_alone(test_double):
    with reference_only():
        assert (torch.ones(2) + test_double(torch.ones(2))).tolist() == [3.0, 3.0]


@needs_c
@pytest.mark.parametrize("op", [onebit_compress, "onebit_compress"])
def test_which_backend_names_the_instruction_set(op):
    error = torch.ones(8)
    choice = which_backend(op, torch.zeros(8), error, 8)
    assert choice.op == "onebit_compress"
    isa = mcp_kernels.build_info().cpu_isa
    assert choice.chosen == f"cpu:{'avx512' if isa == 'avx512_bf16' else isa}"
    assert choice.refused["triton"] == choice.refused["cuda"] == "inputs are on cpu"
    assert error.tolist() == [1.0] * 8, "nothing is computed"
    assert str(choice).splitlines()[0] == f"onebit_compress: {choice.chosen}"


@without_c
def test_which_backend_says_why_there_is_no_compiled_body():
    choice = which_backend(onebit_compress, torch.zeros(8), torch.zeros(8))
    assert choice.chosen == "reference"
    assert choice.refused["cpu"] == mcp_kernels.build_info().reasons["_C"]


def test_which_backend_inside_reference_only():
    with reference_only():
        choice = which_backend("onebit_compress", torch.zeros(8), torch.zeros(8))
    assert choice.chosen == "reference"
    if HAS_C:
        assert choice.refused["cpu"] == "reference_only() is active"


def test_which_backend_takes_an_op_object(test_double):
    for op in (test_double, test_double.default):
        assert which_backend(op, torch.ones(1)).chosen == "reference"
    refused = which_backend(test_double, torch.ones(1)).refused["cpu"]
    assert refused == (
        "mcp_kernels._C has no CPU body for this op"
        if HAS_C
        else mcp_kernels.build_info().reasons["_C"]
    )


def test_which_backend_refuses_what_is_no_op():
    with pytest.raises(ValueError, match=r"op must be one of .*onebit_compress.*, got 'nothing'"):
        which_backend("nothing")
    with pytest.raises(ValueError, match="op must call an op of mcp_kernels, got relu"):
        which_backend(torch.relu, torch.ones(1))
    with pytest.raises(ValueError, match=r"op must be one of .*, got 'aten.add'"):
        which_backend(torch.ops.aten.add, torch.ones(1), 1)


def test_which_backend_takes_the_name_of_a_public_function():
    q = torch.zeros(1, 4, 2, 8)
    by_name = which_backend("flash_attn_func", q, q, q, causal=True)
    assert by_name == which_backend(mcp_kernels.flash_attn_func, q, q, q, causal=True)
    assert by_name.op == "flash_attn"
    with pytest.raises(ValueError, match="which_backend: op must be one of"):
        which_backend("load_extension")
