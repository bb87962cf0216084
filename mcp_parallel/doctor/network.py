"""How ranks would find each other."""

from __future__ import annotations

import ipaddress
import socket
import threading
from collections.abc import Iterator, Mapping

from mcp_parallel.doctor.finding import Finding, export, note, problem, unset
from mcp_parallel.launch.variables import loopback_interface, rank_variables, under_torchrun

_RESOLVE_TIMEOUT_S = 0.5
_SHARED_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


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
        return problem(
            "loopback",
            f"no connection: {error}",
            wanted="connections to 127.0.0.1",
            why="local ranks meet there",
            how="allow them (firewall, network namespace without lo up)",
        )
    return Finding("loopback", "ok", f"127.0.0.1 ({loopback_interface() or 'unnamed'})")


def interface_finding(environ: Mapping[str, str]) -> Finding:
    """The interface that gloo would take."""
    wanted = environ.get("GLOO_SOCKET_IFNAME")
    present = sorted(name for _, name in socket.if_nameindex())
    if wanted:
        absent = [name for name in wanted.split(",") if name.strip() not in present]
        if absent:
            return problem(
                "interface",
                f"{wanted}: not on this machine",
                wanted=f"one of {', '.join(present)}",
                why="gloo refuses to start",
                how="set GLOO_SOCKET_IFNAME to one of these, or unset it",
                fix=unset("GLOO_SOCKET_IFNAME", "it names an interface that is not here"),
            )
        return Finding("interface", "ok", f"{wanted}, by GLOO_SOCKET_IFNAME")
    name = socket.gethostname()
    address = resolve(name)
    if address is None:
        return note(
            "interface",
            f"host name {name} does not resolve",
            wanted="a name that stands for the address that other hosts reach",
            why="gloo takes that interface; local runs use loopback and do not mind",
            how=f"for several hosts set GLOO_SOCKET_IFNAME to one of {', '.join(present)}",
        )
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
        yield note(
            "MASTER_ADDR",
            f"{master} does not resolve",
            wanted="an address that every host can reach",
            why="ranks meet there; local runs ignore it",
            how="give an address, or a name that every host knows",
        )
    elif ipaddress.ip_address(address).is_global:
        yield note(
            "MASTER_ADDR",
            f"{master} is a public address",
            wanted="an address of a private network",
            why="torch's store asks for no password: whoever reaches it can change or end the run",
            how="use the private address, or close the port to all but the hosts of the job",
        )
    else:
        yield Finding("MASTER_ADDR", "ok", f"{master} ({address})")


def launcher_findings(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Being under torchrun, or variables that another launcher left behind."""
    if under_torchrun(environ):
        value = "this process is one of its ranks"
        if environ.get(_SHARED_STORE) == "1":
            yield Finding("torchrun", "ok", value)
            return
        why = "torchrun hands a restarted rank the store of the dead attempt: ours know better"
        yield note(
            "torchrun",
            value,
            wanted=f"{_SHARED_STORE}=1",
            why=f"{why}, other programs may not",
            how="set it where torchrun is started",
            fix=export(_SHARED_STORE, "1", why),
        )
        return
    left = rank_variables(environ)
    if left:
        shown = ", ".join(left[:6]) + (", ..." if len(left) > 6 else "")
        yield note(
            "launcher",
            f"variables of another launcher: {shown}",
            wanted="none, outside of its job",
            why="programs may take this process for one of its ranks; local runs ignore them",
            how="unset them, or open a fresh shell",
        )
    else:
        yield Finding("launcher", "ok", "mcp-parallel starts the ranks of this machine itself")
