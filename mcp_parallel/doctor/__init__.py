"""What of this machine and installation is usable, and what to change. Imports torch when asked."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from mcp_parallel.doctor.finding import Finding, ShellLine, Status
from mcp_parallel.doctor.gpu_links import read_links

__all__ = ["Finding", "ShellLine", "Status", "examine"]


def examine(
    environ: Mapping[str, str] = os.environ,
    root: Path = Path("/"),
    links: Callable[[], str | None] = read_links,
) -> list[Finding]:
    """Look at everything: software, devices, links, processor, memory, limits, network, settings.

    Changes nothing. The CUDA driver is asked for its devices, ``nvidia-smi`` for their links where
    there is one. Needs no GPU and no right of an administrator.

    Args:
        environ: variables that are judged.
        root: where the file system begins whose ``/sys``, ``/proc`` and ``/dev/shm`` are read.
        links: gives what ``nvidia-smi topo -m`` prints, None where there is no such tool.

    Cost: the import of torch, then well under a second; up to half a second more for a slow name
    server and a second for a slow ``nvidia-smi``.
    """
    from mcp_parallel.doctor import (
        allocator,
        devices,
        gpu_links,
        host,
        machine,
        network,
        settings,
        software,
    )
    from mcp_parallel.launch.cores import usable_cores

    return [
        *software.software_findings(),
        *devices.device_findings(environ, host.driver_version(root)),
        *gpu_links.link_findings(links()),
        *machine.processor_findings(environ, root),
        *host.host_findings(root),
        *machine.memory_findings(root),
        *allocator.host_allocator_findings(environ, usable_cores(), root),
        *machine.limit_findings(root),
        *network.network_findings(environ),
        *settings.setting_findings(environ),
    ]
