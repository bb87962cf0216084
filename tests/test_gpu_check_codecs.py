"""The codecs' section of the GPU check, run on the CPU: what is wrong there is found."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mcp_kernels.gpu_check import onebit_step
from mcp_kernels.gpu_check.timing import Bench

CPU = torch.device("cpu")


@pytest.mark.filterwarnings("ignore:(invalid value|overflow|divide by zero) enc:RuntimeWarning")
def test_every_body_of_every_op_is_checked() -> None:
    checks = list(onebit_step.check(CPU, sizes=(1000,)))
    assert all(check.is_passed for check in checks), [c for c in checks if not c.is_passed]
    ops = {check.name.split()[1] for check in checks if check.name.startswith("op ")}
    assert ops == {
        *("onebit_compress_momentum", "onebit_reduce", "onebit_adam_update"),
        *(
            f"{c}_{w}"
            for c in ("int8", "int4", "fp8")
            for w in ("compress", "decompress", "reduce")
        ),
    }


def test_a_wrong_body_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = onebit_step.bodies()["op"]

    def wrong(name: str) -> Any:
        if name != "int4_reduce":
            return right(name)
        return lambda codes, *rest: right(name)(codes ^ 16, *rest)

    monkeypatch.setattr(onebit_step, "bodies", lambda: {"op": right, "mine": wrong})
    failed = [c for c in onebit_step.check(CPU, sizes=(1000,)) if not c.is_passed]
    assert [check.name for check in failed] == ["mine int4_reduce of 1000"]
    assert "elements differ" in failed[0].detail


def test_speed_is_measured_beside_a_copy_and_adamw(monkeypatch: pytest.MonkeyPatch) -> None:
    right = onebit_step.bodies()["op"]
    monkeypatch.setattr(onebit_step, "bodies", lambda: {"op": right})
    measured = list(onebit_step.measure(Bench(CPU, rounds=2, warmup=1), numel=4096))
    assert all(m.ours > 0 for m in measured)
    assert "AdamW(fused=True)" in measured[-1].peers
    assert all("device copy" in m.peers for m in measured[:-1])
