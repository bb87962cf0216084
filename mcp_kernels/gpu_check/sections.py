"""The sections of a GPU check, in the order in which they run. A new one is one line."""

from __future__ import annotations

from mcp_kernels.gpu_check import (
    attention_checks,
    attention_speed,
    onebit,
    onebit_step,
    tensor_parallel,
    tensor_parallel_speed,
)
from mcp_kernels.gpu_check.report import Section

SECTIONS = (
    Section("flash_attention", attention_checks.check, attention_speed.measure),
    onebit.SECTION,
    onebit_step.SECTION,
    Section("tensor_parallel", tensor_parallel.check, tensor_parallel_speed.measure),
)
