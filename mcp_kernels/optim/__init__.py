"""Optimizers that send less than a gradient, and the flat memory that they keep their state in."""

from __future__ import annotations

from mcp_kernels.optim.flat_buffer import flat_buffer
from mcp_kernels.optim.onebit_adam import OneBitAdam, StepReport, mask_without_variance

__all__ = ["OneBitAdam", "StepReport", "flat_buffer", "mask_without_variance"]
