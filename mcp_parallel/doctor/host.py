"""Sockets, frequency, network cards as the kernel shows them below ``/sys`` and ``/proc``.

No torch. ``root`` is where the file system begins, so that tests can show another machine.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from mcp_parallel.doctor.finding import Finding, note

ROOT = Path("/")
# Below this a network between hosts is slower than one lane of PCIe: gradients then dominate.
_SLOW_MBPS = 10_000
# From here on the processor cannot fill the wire with packets of 1,500 bytes.
_FAST_MBPS = 25_000
_JUMBO = 9000
_VIRTUAL = ("lo", "docker", "veth", "br-", "virbr", "ifb", "dummy", "tun", "tap", "cni", "flannel")


def read(root: Path, *parts: str) -> str:
    """A file's text without the line end; "" where it cannot be read."""
    try:
        return root.joinpath(*parts).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def host_findings(root: Path = ROOT) -> Iterator[Finding]:
    """All that this file looks at."""
    yield from numa_findings(root)
    yield from governor_findings(root)
    yield from card_findings(root)
    yield from infiniband_findings(root)


def driver_version(root: Path = ROOT) -> str | None:
    """Version of NVIDIA's kernel module, None where none is loaded."""
    match = re.search(r"\b(\d{3,}\.\d+(?:\.\d+)?)\b", read(root, "proc/driver/nvidia/version"))
    return match.group(1) if match else None


def numa_nodes(root: Path) -> dict[int, str]:
    """Cores of each NUMA node that has some, ``{0: "0-15"}``."""
    folder = root / "sys/devices/system/node"
    found = {
        int(entry.name[4:]): read(entry, "cpulist")
        for entry in sorted(folder.glob("node[0-9]*"))
        if entry.name[4:].isdigit()
    }
    return {node: cores for node, cores in sorted(found.items()) if cores}


def numa_findings(root: Path) -> Iterator[Finding]:
    """Sockets, and whether the kernel moves pages between them by itself."""
    nodes = numa_nodes(root)
    if not nodes:
        return
    shown = ", ".join(f"{node}: cores {cores}" for node, cores in nodes.items())
    yield Finding("NUMA", "ok", f"{len(nodes)} node{'s' * (len(nodes) > 1)} ({shown})")
    if len(nodes) > 1 and read(root, "proc/sys/kernel/numa_balancing") not in ("", "0"):
        yield note(
            "NUMA balancing",
            "on",
            wanted="off",
            why="the kernel unmaps pages to see who uses them, which stalls ranks that are bound "
            "to a node already",
            how="as root: sysctl kernel.numa_balancing=0",
        )


def governor_findings(root: Path) -> Iterator[Finding]:
    """What sets the processor's frequency; nothing where the kernel does not say (a guest)."""
    files = root.glob("sys/devices/system/cpu/cpu[0-9]*/cpufreq/scaling_governor")
    modes = sorted({mode for file in files if (mode := read(file))})
    if not modes:
        return
    if modes == ["performance"]:
        yield Finding("CPU governor", "ok", "performance")
        return
    yield note(
        "CPU governor",
        ", ".join(modes),
        wanted="performance",
        why="cores that wait for a message slow down, and are slow when it comes",
        how="as root: cpupower frequency-set -g performance",
    )


def card_findings(root: Path) -> Iterator[Finding]:
    """Ethernet cards that are up: speed, and packet size where the card is fast."""
    fastest = 0
    for folder in sorted(root.glob("sys/class/net/*")):
        name = folder.name
        if name.startswith(_VIRTUAL) or read(folder, "operstate") != "up":
            continue
        speed, mtu = read(folder, "speed"), read(folder, "mtu")
        mbps = int(speed) if speed.isdigit() else 0
        fastest = max(fastest, mbps)
        value = f"{_rate(mbps)}, packets of {mtu} bytes"
        if mbps >= _FAST_MBPS and mtu.isdigit() and int(mtu) < _JUMBO - 100:
            yield note(
                f"card {name}",
                value,
                wanted=f"packets of {_JUMBO} bytes",
                why="a core cannot fill a card this fast with small packets",
                how=f"as root: ip link set {name} mtu {_JUMBO}, on every host and the switch",
            )
        else:
            yield Finding(f"card {name}", "ok", value)
    if 0 < fastest < _SLOW_MBPS and not _ports(root):
        yield note(
            "network",
            f"{_rate(fastest)} at most",
            wanted="10 Gb/s or more between hosts",
            why="the gradients of 1e9 parameters take half a minute a step at 1 Gb/s",
            how="train on one host, or with --set train.optimizer=onebit_adam, which sends a 32nd",
        )


def _rate(mbps: int) -> str:
    return f"{mbps / 1000:g} Gb/s" if mbps else "speed unknown"


def _ports(root: Path) -> dict[str, Path]:
    """InfiniBand and RoCE ports, ``mlx5_0/1`` -> folder."""
    folders = sorted(root.glob("sys/class/infiniband/*/ports/*"))
    return {f"{folder.parent.parent.name}/{folder.name}": folder for folder in folders}


def infiniband_findings(root: Path) -> Iterator[Finding]:
    """State and rate of each port; whether GPUs can be read by the cards."""
    ports = _ports(root)
    if not ports:
        return
    down = []
    for name, folder in ports.items():
        state = read(folder, "state").partition(":")[2].strip() or "state unknown"
        rate, kind = read(folder, "rate"), read(folder, "link_layer")
        if state != "ACTIVE":
            down.append(f"{name} {state}")
            continue
        yield Finding(f"port {name}", "ok", f"{kind} {rate}".strip())
    if down and len(down) < len(ports):
        yield note(
            "InfiniBand",
            f"not active: {', '.join(down)}",
            wanted="every port that is cabled active",
            why="NCCL spreads over the ports it finds; a host with fewer slows all others",
            how="look at ibstat and the cable; ports without one can be left out by NCCL_IB_HCA",
        )
    elif down:
        yield note(
            "InfiniBand",
            f"no port is active: {', '.join(down)}",
            wanted="an active port",
            why="hosts talk over TCP instead",
            how="look at ibstat, the cable and the subnet manager",
        )
    modules = read(root, "proc/modules")
    if driver_version(root) and "nvidia_peermem" not in modules:
        yield note(
            "GPUDirect RDMA",
            "nvidia_peermem is not loaded",
            wanted="the module, or a kernel and driver with dma-buf",
            why="network cards then reach GPU memory through a copy in host memory",
            how="as root: modprobe nvidia_peermem; on kernel 5.12 and newer with the open driver "
            "NCCL uses dma-buf without it (NCCL_DEBUG=INFO says GDRDMA)",
        )
