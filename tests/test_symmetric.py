"""Symmetric memory's host side without a GPU: layout, decision of a group, errors, refusals."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import PATIENCE_S, RankPool

from mcp_kernels.symmetric import Settings, agree, settings
from mcp_kernels.symmetric.agree import Facts, ask, decide
from mcp_kernels.symmetric.all_reduce import MULTICAST, ONE_SHOT, TWO_SHOT, choose_form
from mcp_kernels.symmetric.channel import raise_error
from mcp_kernels.symmetric.layout import CUDA_ROWS, Layout, Missed, read_error, windows
from mcp_kernels.symmetric.peers import Peers
from mcp_kernels.symmetric.refuses import (
    refuses_all_gather_matmul,
    refuses_all_reduce,
    refuses_matmul_all_reduce,
    refuses_matmul_reduce_scatter_backward,
    refuses_reduce_scatter,
)

ROOT = Path(__file__).resolve().parent.parent
FACTS = Facts(host=1, device=1, num_programs=132, capability=90, has_cuda_op=1, configured=7)


def test_python_and_cuda_agree_on_the_layout() -> None:
    text = (ROOT / "csrc/cuda/symmetric.cuh").read_text(encoding="utf-8")
    numbers = {name: int(value) for name, value in re.findall(r"(k\w+) = (\d+)", text)}
    assert numbers["kMaxBlocks"] * numbers["kPhases"] == CUDA_ROWS
    assert (numbers["kFlagsAt"], numbers["kSlotAlign"]) == (512, 4096)
    assert (numbers["kTicketAt"], numbers["kDeadAt"]) == (128, 256)
    # int64_t flag_bytes = 2 * kPhases * kMaxBlocks * world * 8, behind the head, aligned.
    assert (
        Layout(8, CUDA_ROWS, 1 << 20).slots_at == -(-(512 + 2 * CUDA_ROWS * 8 * 8) // 4096) * 4096
    )


@given(st.integers(0, 1000), st.integers(1, 300))
def test_windows_cover_everything_once(size: int, most: int) -> None:
    pieces = list(windows(size, most))
    assert [i for start, length in pieces for i in range(start, start + length)] == list(
        range(size)
    )
    assert all(length <= most for _, length in pieces)
    assert len(pieces) == max(1, -(-size // most))


def test_a_group_decides_together() -> None:
    ranks = [replace(FACTS, device=device) for device in range(4)]
    answer = decide([*ranks[:3], replace(ranks[3], num_programs=108, has_cuda_op=0)])
    assert (answer.refusal, answer.num_programs, answer.has_cuda_op) == (None, 108, False)
    for odd, words in (
        (replace(ranks[3], host=2), "needs all ranks on one host, got 2 hosts"),
        (replace(ranks[3], device=0), "needs a GPU for each rank, got ranks that share one"),
        (replace(ranks[3], capability=75), "needs sm_80 or newer on every rank, got sm_75"),
        (replace(ranks[3], configured=8), "needs equal settings on every rank"),
    ):
        refusal = decide([*ranks[:3], odd]).refusal
        assert refusal is not None
        assert words in refusal


def decided(rank: int, world: int, has_cuda_op: bool) -> list[str | None]:
    """What a group whose ranks (or all but one) built the CUDA collectives refuses."""
    group = torch.distributed.group.WORLD
    assert group is not None
    device, name = torch.device("cpu"), group.group_name
    mine = replace(FACTS, device=rank, has_cuda_op=int(has_cuda_op or rank > 0))
    agree._agreements[name, device] = ask(group, device, mine, lambda facts: True)
    try:
        wide, x = torch.zeros(4, 6, dtype=torch.float64), torch.zeros(4, 6)
        return [
            refuses_matmul_all_reduce(wide, wide, None, name),
            refuses_matmul_all_reduce(x, x, None, name),
            refuses_all_gather_matmul(x, [x], [], name, 1, None, True),
            refuses_all_gather_matmul(x, [x], [], name, 0, None, True),
            refuses_reduce_scatter(x, name, 0),
        ]
    finally:
        agree.forget(name)


def test_float64_and_features_go_through_the_cuda_collectives(ranks: RankPool) -> None:
    assert ranks.run(decided, True, ranks=2) == [[None] * 5] * 2
    missing = "needs the CUDA collectives built on every rank"
    assert ranks.run(decided, False, ranks=2) == [[missing, None, missing, None, missing]] * 2


def ask_the_group(rank: int, world: int, odd_host: int, blind: int) -> str | None:
    mine = replace(FACTS, device=rank, host=2 if rank == odd_host else 1)
    group = torch.distributed.group.WORLD
    assert group is not None
    return ask(group, torch.device("cpu"), mine, lambda facts: rank != blind).refusal


@pytest.mark.parametrize(
    "odd_host, blind, words",
    [(-1, -1, "None"), (2, -1, "one host"), (-1, 0, "peer access"), (1, 0, "one host")],
)
def test_what_one_rank_sees_every_rank_decides(
    ranks: RankPool, odd_host: int, blind: int, words: str
) -> None:
    answers = ranks.run(ask_the_group, odd_host, blind, ranks=3)
    assert len(set(answers)) == 1
    assert words in str(answers[0])


REGISTERED = """
import torch
torch.version.cuda = "13.0"  # what a CUDA build says
import mcp_kernels
from torch._subclasses.fake_tensor import FakeTensorMode
with FakeTensorMode():
    x, weight = torch.empty(4, 8, device="cuda"), torch.empty(2, 8, device="cuda")
    calls = {
        "matmul_all_reduce": (x, weight, None, ""),
        "matmul_reduce_scatter": (x, weight, None, "", 0),
        "all_gather_matmul": (x, [weight], [], "", 0, None, False),
    }
    for op, args in calls.items():
        print(mcp_kernels.which_backend(op, *args).chosen)
print(torch.cuda.is_initialized())
"""


@pytest.mark.slow
@pytest.mark.skipif(torch.version.cuda is not None, reason="pretends to be a CUDA build")
def test_bodies_register_on_a_cuda_build() -> None:
    pytest.importorskip("triton")
    command = [sys.executable, "-W", "ignore", "-c", REGISTERED]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.split() == ["triton", "triton", "triton", "False"]


def make_peers(word: int) -> Peers:
    error = torch.tensor([word - (1 << 64) if word >> 63 else word])
    return Peers(1, Layout(4, 129, 1 << 20), torch.zeros(4), error, 2 * 10**9, 8)


def test_an_error_word_names_op_rank_and_call() -> None:
    assert read_error(0) is None
    raise_error("all_reduce", make_peers(0))
    word = 1 << 63 | 3 << 40 | 17
    assert read_error(word) == Missed(rank=3, epoch=17)
    with pytest.raises(RuntimeError, match=r"all_reduce: rank 3 must take part in call 17 .* 2 s"):
        raise_error("all_reduce", make_peers(word))


def test_refusals_need_no_group_where_the_type_decides() -> None:
    x, weight = torch.zeros(2, 3, dtype=torch.int64), torch.zeros(4, 3, dtype=torch.int64)
    assert refuses_matmul_all_reduce(x, weight, None, "") is None
    reason = refuses_matmul_all_reduce(x, weight, None, "tp")
    assert reason == "needs one of float32, bfloat16, float16, float64, got int64"
    assert refuses_all_gather_matmul(x, [weight], [], "tp", 1, None, True) == reason
    assert refuses_reduce_scatter(x, "tp", 0) == reason
    given = (x, x, weight, [True, True, False], "tp")
    reason = refuses_matmul_reduce_scatter_backward(*given, 1, 3)
    assert reason == "needs rows to gather, got scatter_dim on the out features"
    assert "needs one of float32, bfloat16, float16, got" in str(
        refuses_matmul_reduce_scatter_backward(*given, 0, 3)
    )
    reason = refuses_matmul_reduce_scatter_backward(x, x, None, [False, True, True], "tp", 0, 3)
    assert reason == "needs dx to compute while dy arrives"
    large = torch.zeros(1).expand(17 << 20)
    assert "leaves more than 64 MiB" in str(refuses_all_reduce(large, "tp"))
    assert "got int64" in str(refuses_all_reduce(torch.zeros(2, dtype=torch.int64), "tp"))


@pytest.mark.parametrize(
    "num_bytes, world, has_multicast, form",
    [
        (1 << 30, 2, False, ONE_SHOT),
        (512 << 10, 4, False, ONE_SHOT),
        (512 << 10, 8, False, TWO_SHOT),
        (1 << 10, 72, False, TWO_SHOT),
        (1 << 20, 8, True, TWO_SHOT),
        (2 << 20, 8, True, MULTICAST),
    ],
)
def test_forms(num_bytes: int, world: int, has_multicast: bool, form: int) -> None:
    assert choose_form(num_bytes, torch.bfloat16, world, has_multicast) == form
    assert choose_form(num_bytes, torch.float64, world, has_multicast) != MULTICAST


def test_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="slot_bytes must be a positive multiple of 1 MiB, got 5"):
        Settings(slot_bytes=5)
    with pytest.raises(ValueError, match="timeout_s must be in"):
        Settings(timeout_s=0.0)
    monkeypatch.setattr(settings, "_is_used", False)
    monkeypatch.setattr(settings, "_current", Settings())
    settings.configure(Settings(timeout_s=5.0))
    assert settings.settings().timeout_s == 5.0
    with pytest.raises(RuntimeError, match="settings must be made before the first call"):
        settings.configure(Settings(timeout_s=6.0))
