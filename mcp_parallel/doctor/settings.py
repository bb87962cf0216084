"""Environment variables of NCCL and torch that change how a run behaves."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping

from mcp_parallel.doctor.finding import Finding, ShellLine, export, note, unset

_SHOWN_PREFIXES = ("NCCL_", "TORCH_NCCL_", "TORCH_FR_", "CUDA_", "MCP_", "GLOO_", "UCX_")
_OFF = frozenset({"", "0", "false", "off", "no"})

# Slow or noisy when on, and easily left behind after a search for a fault.
_LEFT_ON = {
    "NCCL_P2P_DISABLE": "GPUs of one host then talk through host memory",
    "NCCL_SHM_DISABLE": "GPUs of one host without NVLink then talk over sockets",
    "NCCL_IB_DISABLE": "hosts with InfiniBand or RoCE then talk over TCP",
    "NCCL_CHECKS_DISABLE": "wrong arguments then hang instead of failing",
    "CUDA_LAUNCH_BLOCKING": "every kernel then waits for the one before",
    "TORCH_NCCL_BLOCKING_WAIT": "every collective then blocks the host",
    "TORCH_DISTRIBUTED_DEBUG": "every collective is then checked on all ranks",
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
        new, why = _RENAMED[name], "torch ignores the old name, or warns of it"
        line = ShellLine(f'export {new}="${name}"; unset {name}', why)
        how = f"rename it to {new}"
        return note(name, value, wanted=f"the same in {new}", why=why, how=how, fix=line)
    if name in _LEFT_ON and value.lower() not in _OFF:
        return _unwanted(name, value, _LEFT_ON[name])
    if name == "TORCH_NCCL_ASYNC_ERROR_HANDLING" and value == "0":
        return _unwanted(name, value, "a dead rank then leaves all others waiting for ever")
    if name == "NCCL_DEBUG" and value.upper() in ("INFO", "TRACE"):
        why = "every rank then logs a lot"
        line = export(name, "WARN", why)
        return note(name, value, wanted="WARN", why=why, how="set it to WARN", fix=line)
    if name == "NCCL_SOCKET_IFNAME":
        return _nccl_interface(name, value)
    if name in _FORCED:
        why = "NCCL knows the topology better"
        return note(name, value, wanted="unset, or measured", why=why, how="unset it, or measure")
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
    return note(
        name,
        value,
        wanted=f"one of {', '.join(sorted(present))}",
        why="no interface here has that name: NCCL refuses to start",
        how="correct it, or unset it",
        fix=unset(name, "it names an interface that is not here"),
    )


def _unwanted(name: str, value: str, why: str) -> Finding:
    return note(name, value, wanted="unset", why=why, how="unset it", fix=unset(name, why))
