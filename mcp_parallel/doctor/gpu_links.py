"""How GPUs and network cards of this machine are joined: ``nvidia-smi topo -m``. No torch."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from mcp_parallel.doctor.finding import Finding, note

_TIMEOUT_S = 1.0
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_DEVICE = re.compile(r"GPU\d+|NIC\d+|[A-Za-z]+\d*_(?:bond_)?\d+")
_LINK = re.compile(r"NV\d+|SYS|NODE|PHB|PXB|PIX|X(?![A-Z])")
_NAMED = re.compile(r"\s*(NIC\d+)\s*:\s*(\S+)")
_CORES = re.compile(r"\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*")

# From the nearest to the farthest, as the tool's legend orders them.
_NEAR_NIC = ("PIX", "PXB")
_WORDS = {
    "PIX": "one PCIe switch",
    "PXB": "PCIe switches",
    "PHB": "the processor's PCIe bridge",
    "NODE": "PCIe bridges of one socket",
    "SYS": "the link between sockets",
}


@dataclass(frozen=True, slots=True)
class GpuLinks:
    """What the table says; names as in it, ``GPU0``, ``mlx5_0``."""

    gpus: tuple[str, ...]
    cards: tuple[str, ...]
    """Network cards."""
    links: Mapping[tuple[str, str], str]
    """(GPU, other GPU or card) -> ``NV18``, ``PIX``, ``PXB``, ``PHB``, ``NODE`` or ``SYS``."""
    numa: Mapping[str, int]
    """GPU -> NUMA node, where the table says."""

    def islands(self) -> list[tuple[str, ...]]:
        """The largest groups of GPUs that NVLink joins, each GPU in one; alone where it has none.

        GPUs count as joined when a chain of links does, as behind a switch or in a ring.
        """
        left, found = list(self.gpus), []
        while left:
            island, waiting = [], [left.pop(0)]
            while waiting:
                gpu = waiting.pop()
                island.append(gpu)
                near = [other for other in left if self.links[gpu, other].startswith("NV")]
                waiting += near
                left = [other for other in left if other not in near]
            found.append(tuple(sorted(island, key=self.gpus.index)))
        return found

    def nearest_card(self, gpu: str) -> tuple[str, str] | None:
        """(card, link) of the network card nearest to ``gpu``; None where there is no card."""
        order = ["PIX", "PXB", "PHB", "NODE", "SYS"]
        pairs = [(self.links[gpu, card], card) for card in self.cards]
        if not pairs:
            return None
        link, card = min(pairs, key=lambda pair: order.index(pair[0]))
        return card, link


def read_links() -> str | None:
    """What ``nvidia-smi topo -m`` prints; None where there is no such tool or it fails."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    try:
        done = subprocess.run(
            [tool, "topo", "-m"], capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def parse_links(text: str) -> GpuLinks:
    """Read the table of ``nvidia-smi topo -m``.

    Raises:
        ValueError: it is no such table, or a row of it is cut off.
    """
    lines = [_ANSI.sub("", line).rstrip() for line in text.splitlines()]
    at = next((i for i, line in enumerate(lines) if re.match(r"\s+GPU\d+\b", line)), None)
    if at is None:
        raise ValueError("doctor: nvidia-smi topo -m must print a table of GPUs, got none")
    columns = _DEVICE.findall(lines[at].split("CPU Affinity")[0])
    matches = (_NAMED.match(line) for line in lines)
    names = {match[1]: match[2] for match in matches if match}
    gpus = tuple(name for name in columns if name.startswith("GPU"))
    called = {name: names.get(name, name) for name in columns}
    links: dict[tuple[str, str], str] = {}
    numa: dict[str, int] = {}
    for line in lines[at + 1 :]:
        name = line.split(maxsplit=1)[0] if line.split() else ""
        if name not in gpus:
            continue
        cells = list(_LINK.finditer(line, len(name)))[: len(columns)]
        if len(cells) < len(columns):
            raise ValueError(
                f"doctor: row {name} of nvidia-smi topo -m must have {len(columns)} links, got "
                f"{len(cells)}"
            )
        for column, cell in zip(columns, cells, strict=True):
            links[name, called[column]] = cell.group()
        rest = line[cells[-1].end() :].split()
        # CPU affinity, NUMA affinity, GPU NUMA id; a machine without NUMA prints N/A.
        if len(rest) > 1 and _CORES.fullmatch(rest[0]) and rest[1].isdigit():
            numa[name] = int(rest[1])
    cards = tuple(called[name] for name in columns if not name.startswith("GPU"))
    return GpuLinks(gpus, cards, links, numa)


def link_findings(text: str | None) -> Iterator[Finding]:
    """What the links between GPUs, and from them to the network, mean for a layout."""
    if text is None:
        return
    try:
        links = parse_links(text)
    except ValueError as error:
        yield Finding("GPU links", "ok", f"unknown: {error}")
        return
    if len(links.gpus) > 1:
        yield _gpu_finding(links)
    if links.cards:
        yield _card_finding(links)
    nodes = sorted(set(links.numa.values()))
    if len(nodes) > 1:
        each = ", ".join(
            f"{node}: {' '.join(g for g in links.gpus if links.numa.get(g) == node)}"
            for node in nodes
        )
        yield note(
            "GPU and socket",
            f"NUMA nodes {each}",
            wanted="each rank's threads and memory on the node of its GPU",
            why="copies to a GPU of the other socket take half of the speed or less",
            how="start torchrun with --numa-binding node, as `mcp-parallel launch --numa` does",
        )


def _gpu_finding(links: GpuLinks) -> Finding:
    islands = links.islands()
    largest = max(map(len, islands))
    if largest == len(links.gpus):
        kinds = sorted({links.links[a, b] for a in links.gpus for b in links.gpus if a != b})
        value = f"NVLink joins all {largest} ({', '.join(kinds)}): tp up to {largest}"
        return Finding("GPU links", "ok", value)
    if largest > 1:
        groups = " | ".join(" ".join(island) for island in islands)
        return note(
            "GPU links",
            f"NVLink joins {groups}",
            wanted=f"tp groups within an island: tp up to {largest}",
            why="a wider group sends each layer's activations over PCIe",
            how=f"use parallel.tp <= {largest}, and pp or dp between the islands; "
            f"parallel.link_domain={largest} refuses what is wider",
        )
    pairs = sorted({links.links[a, b] for a in links.gpus for b in links.gpus if a != b})
    words = ", ".join(f"{kind} ({_WORDS.get(kind, kind)})" for kind in pairs)
    return note(
        "GPU links",
        f"no NVLink; {words}",
        wanted="NVLink for tensor parallelism",
        why="PCIe carries a tenth of its bytes a second, and tp sends in each layer",
        how="prefer dp with zero, and pp; keep tp at 1 or 2",
    )


def _card_finding(links: GpuLinks) -> Finding:
    nearest = {gpu: links.nearest_card(gpu) for gpu in links.gpus}
    far = [gpu for gpu, pair in nearest.items() if pair and pair[1] not in _NEAR_NIC]
    shown = ", ".join(f"{gpu}-{pair[0]} {pair[1]}" for gpu, pair in nearest.items() if pair)
    if not far:
        return Finding("GPU to network", "ok", shown)
    return note(
        "GPU to network",
        shown,
        wanted="a card behind the same PCIe switch (PIX, PXB) for each GPU",
        why=f"{' '.join(far)} reach the network through the processor, so that GPUDirect RDMA is "
        "slower or off",
        how="see that all cards are plugged in and visible here; NCCL_IB_HCA must not hide any",
    )
