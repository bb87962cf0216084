"""3D-parallel training of Transformers: one text config, the same loss in every layout.

Importing this package imports no torch: a configuration is judged in a fraction of a second.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

# The module and the function share a name: importing it here, before anyone else can, makes
# ``mcp_parallel.check`` the function for good.
from mcp_parallel.check import check
from mcp_parallel.config import Config
from mcp_parallel.layout import Layout
from mcp_parallel.planner.plan import Plan, plan

if TYPE_CHECKING:
    from mcp_parallel.trainer import Trainer

__all__ = ["Config", "Layout", "Plan", "Trainer", "check", "plan"]


def __getattr__(name: str) -> Any:
    if name == "Trainer":
        from mcp_parallel.trainer import Trainer

        return Trainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
