"""What of this machine and installation is usable, and what to change. Imports torch when asked."""

from __future__ import annotations

import os

from mcp_parallel.doctor.finding import Finding, Status

__all__ = ["Finding", "Status", "examine"]


def examine() -> list[Finding]:
    """Look at everything: software, devices, processor, memory, limits, network, settings.

    Changes nothing and starts no process. The CUDA driver is asked for its devices.

    Cost: the import of torch, then well under a second; up to 2 s more for a slow name server.
    """
    from mcp_parallel.doctor import devices, machine, network, settings, software

    return [
        *software.software_findings(),
        *devices.device_findings(os.environ),
        *machine.processor_findings(os.environ),
        *machine.memory_findings(),
        *machine.limit_findings(),
        *network.network_findings(os.environ),
        *settings.setting_findings(os.environ),
    ]
