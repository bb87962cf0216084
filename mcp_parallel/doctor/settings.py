"""Environment variables of NCCL and torch that change how a run behaves."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping

from mcp_parallel.doctor.finding import Finding

_SHOWN_PREFIXES = ("NCCL_", "TORCH_NCCL_", "TORCH_FR_", "CUDA_", "MCP_")
_OFF = frozenset({"", "0", "false", "off", "no"})

# Slow or noisy when on, and easily left behind after a search for a fault.
_LEFT_ON = {
    "NCCL_P2P_DISABLE": "GPUs of one host then talk through host memory: unset it",
    "NCCL_SHM_DISABLE": "GPUs of one host without NVLink then talk over sockets: unset it",
    "NCCL_IB_DISABLE": "hosts then talk over TCP: unset it where there is InfiniBand or RoCE",
    "NCCL_CHECKS_DISABLE": "wrong arguments then hang instead of failing: unset it",
    "CUDA_LAUNCH_BLOCKING": "every kernel then waits for the one before: unset it",
    "TORCH_NCCL_BLOCKING_WAIT": "every collective then blocks the host: unset it",
    "TORCH_DISTRIBUTED_DEBUG": "every collective is then checked on all ranks: unset it",
}

# Old name -> new name; torch ignores the old one or warns of it.
_RENAMED = {
    "NCCL_ASYNC_ERROR_HANDLING": "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "NCCL_BLOCKING_WAIT": "TORCH_NCCL_BLOCKING_WAIT",
    "NCCL_DESYNC_DEBUG": "TORCH_NCCL_DESYNC_DEBUG",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "TORCH_FR_BUFFER_SIZE",
}

_FORCED = ("NCCL_ALGO", "NCCL_PROTO", "NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS")


def setting_findings(environ: Mapping[str, str]) -> Iterator[Finding]:
    """A finding for each variable that is set and matters."""
    for name in sorted(environ):
        finding = _judge(name, environ[name])
        if finding is not None:
            yield finding


def _judge(name: str, value: str) -> Finding | None:
    if name in _RENAMED:
        return Finding(name, "note", value, f"rename it to {_RENAMED[name]}")
    if name in _LEFT_ON and value.lower() not in _OFF:
        return Finding(name, "note", value, _LEFT_ON[name])
    if name == "NCCL_DEBUG" and value.upper() in ("INFO", "TRACE"):
        return Finding(name, "note", value, "every rank then logs a lot: use WARN")
    if name == "NCCL_SOCKET_IFNAME":
        return _nccl_interface(name, value)
    if name in _FORCED:
        return Finding(name, "note", value, "NCCL knows the topology better: unset it, or measure")
    if name.startswith(_SHOWN_PREFIXES):
        return Finding(name, "ok", value)
    return None


def _nccl_interface(name: str, value: str) -> Finding:
    """NCCL takes a list of prefixes, ``=eth0`` for exact names, ``^docker`` for all but these."""
    present = [interface for _, interface in socket.if_nameindex()]
    exact, wanted = value.startswith("="), value.lstrip("=").split(",")
    if value.startswith("^"):
        return Finding(name, "ok", value)
    matched = any(
        interface == want if exact else interface.startswith(want)
        for interface in present
        for want in wanted
    )
    if matched:
        return Finding(name, "ok", value)
    advice = f"no interface here has that name; there are {', '.join(sorted(present))}"
    return Finding(name, "note", value, advice)
