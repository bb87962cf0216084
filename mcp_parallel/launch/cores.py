"""How many processor cores this process may use: affinity mask and container quota. No torch."""

from __future__ import annotations

import math
import os
from pathlib import Path

# cgroup v2 and v1 keep the CPU quota here, seen from inside a container.
_QUOTA_V2 = Path("/sys/fs/cgroup/cpu.max")
_QUOTA_V1 = Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us")
_PERIOD_V1 = Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us")


def affinity_cores() -> int:
    """Logical cores that the scheduler may put this process on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def quota_cores() -> float | None:
    """Cores' worth of time that the container's quota grants; None where there is no quota."""
    try:
        if _QUOTA_V2.is_file():
            quota, period = _QUOTA_V2.read_text().split()
        else:
            quota, period = _QUOTA_V1.read_text().strip(), _PERIOD_V1.read_text().strip()
        if quota in ("max", "-1"):
            return None
        return int(quota) / int(period)
    except (OSError, ValueError):
        return None


def usable_cores() -> int:
    """Cores worth planning threads for: the smaller of the affinity mask and the quota, >= 1."""
    quota = quota_cores()
    cores = affinity_cores()
    return max(1, cores if quota is None else min(cores, math.floor(quota)))


def threads_per_rank(local_ranks: int) -> int:
    """Threads for each of ``local_ranks``: ``OMP_NUM_THREADS`` if set, else an equal share.

    More threads than cores is far slower than fewer: OpenMP barriers wait for threads that the
    scheduler has put aside.
    """
    wanted = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if wanted.isdigit() and int(wanted) > 0:
        return int(wanted)
    return max(1, usable_cores() // max(1, local_ranks))
