"""How ranks would find each other."""

from __future__ import annotations

import ipaddress
import socket
import threading
from collections.abc import Iterator, Mapping

from mcp_parallel.doctor.finding import Finding
from mcp_parallel.launch.variables import loopback_interface, rank_variables, under_torchrun

_RESOLVE_TIMEOUT_S = 2.0


def network_findings(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Loopback, interface, host name, MASTER_ADDR and what launchers left in the environment."""
    yield _loopback_finding()
    yield interface_finding(environ)
    yield from master_findings(environ)
    yield from launcher_findings(environ)


def _loopback_finding() -> Finding:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=_RESOLVE_TIMEOUT_S).close()
    except OSError as error:
        advice = "local ranks meet on 127.0.0.1: allow connections there"
        return Finding("loopback", "problem", f"no connection: {error}", advice)
    return Finding("loopback", "ok", f"127.0.0.1 ({loopback_interface() or 'unnamed'})")


def interface_finding(environ: Mapping[str, str]) -> Finding:
    """The interface that gloo would take."""
    wanted = environ.get("GLOO_SOCKET_IFNAME")
    present = sorted(name for _, name in socket.if_nameindex())
    if wanted:
        absent = [name for name in wanted.split(",") if name.strip() not in present]
        if absent:
            advice = f"set GLOO_SOCKET_IFNAME to one of {', '.join(present)}, or unset it"
            return Finding("interface", "problem", f"{wanted}: not on this machine", advice)
        return Finding("interface", "ok", f"{wanted}, by GLOO_SOCKET_IFNAME")
    name = socket.gethostname()
    address = resolve(name)
    if address is None:
        advice = (
            "local runs use loopback; for several hosts set GLOO_SOCKET_IFNAME to one of "
            f"{', '.join(present)}, since gloo takes the one that the host name stands for"
        )
        return Finding("interface", "note", f"host name {name} does not resolve", advice)
    if ipaddress.ip_address(address).is_loopback:
        advice = "local runs want that; for several hosts set GLOO_SOCKET_IFNAME"
        return Finding("interface", "ok", f"host name {name} is {address}; {advice}")
    return Finding("interface", "ok", f"host name {name} is {address}; local runs use loopback")


def resolve(name: str) -> str | None:
    """An address of ``name``; None when there is none or the name server takes too long."""
    found: list[str] = []

    def ask() -> None:
        try:
            found.append(str(socket.getaddrinfo(name, None)[0][4][0]).split("%")[0])
        except OSError:
            return

    thread = threading.Thread(target=ask, daemon=True)  # getaddrinfo knows no timeout
    thread.start()
    thread.join(_RESOLVE_TIMEOUT_S)
    return found[0] if found else None


def master_findings(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Where ranks of several hosts would meet, if that is set."""
    master = environ.get("MASTER_ADDR")
    if not master:
        return
    address = resolve(master)
    if address is None:
        advice = "give an address that every host can reach; local runs ignore it"
        yield Finding("MASTER_ADDR", "note", f"{master} does not resolve", advice)
    elif ipaddress.ip_address(address).is_global:
        advice = (
            "use a private network: torch's store asks for no password, and whoever reaches it "
            "can change or end the run"
        )
        yield Finding("MASTER_ADDR", "note", f"{master} is a public address", advice)
    else:
        yield Finding("MASTER_ADDR", "ok", f"{master} ({address})")


def launcher_findings(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Being under torchrun, or variables that another launcher left behind."""
    if under_torchrun(environ):
        value = "this process is one of its ranks"
        if environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") == "1":
            yield Finding("torchrun", "ok", value)
        else:
            advice = (
                "our ranks survive a restart, other programs may not: torchrun hands them the "
                "store of the dead attempt unless TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
            )
            yield Finding("torchrun", "note", value, advice)
        return
    left = rank_variables(environ)
    if left:
        shown = ", ".join(left[:6]) + (", ..." if len(left) > 6 else "")
        advice = "local runs ignore them; unset them for other programs"
        yield Finding("launcher", "note", f"variables of another launcher: {shown}", advice)
    else:
        yield Finding("launcher", "ok", "mcp-parallel starts the ranks of this machine itself")
