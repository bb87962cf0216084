"""Starting ranks on this machine or as part of a torchrun job, and watching over them."""

from __future__ import annotations

# Seconds that a rank waits for another: long enough for eight ranks on two busy cores to start,
# short enough to notice a hang.
DEFAULT_TIMEOUT_S = 120.0
