"""The backend "shm" over two hosts: namespaces of network and IPC, joined by a virtual cable.

Ranks of one namespace share memory, since their host identities are equal; between the two there is
nothing but the cable. Nothing is forced: each rank finds out for itself who stands where.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest
from ranks import PATIENCE_S

pytest.importorskip("mcp_kernels._shm", reason="the _shm extension was not built")

pytestmark = pytest.mark.slow  # two processes that import torch, besides the ranks they fork

RANKS_PER_HOST = 2
HOST = """
import os, sys, torch, torch.distributed as dist
import mcp_kernels.shm
host, per_host, address, interface = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
os.environ["GLOO_SOCKET_IFNAME"] = interface
torch.set_num_threads(1)
local = 0
for other in range(1, per_host):
    if os.fork() == 0:
        local = other
        break
rank, world = host * per_host + local, 2 * per_host
init = f"tcp://{address}:29511"
dist.init_process_group("cpu:shm", init_method=init, rank=rank, world_size=world)
group = dist.group.WORLD
assert group.place.hosts == ((0, 1), (2, 3)), group.place.hosts
x = torch.arange(10_001.0) % 50 + rank
expected = sum(torch.arange(10_001.0) % 50 + peer for peer in range(world))
total = x.clone()
dist.all_reduce(total)
assert torch.equal(total, expected)
rows = torch.arange(4_000.0) % 7 + rank
mine = torch.empty(1_000)
group._reduce_scatter_base(mine, rows).wait()
whole = sum(torch.arange(4_000.0) % 7 + peer for peer in range(world))
assert torch.equal(mine, whole[rank * 1_000 : (rank + 1) * 1_000])
gathered = torch.empty(world, 3)
group._allgather_base(gathered, torch.full((3,), float(rank))).wait()
assert gathered[:, 0].tolist() == [0.0, 1.0, 2.0, 3.0]
dist.broadcast(x, 3)
assert torch.equal(x, torch.arange(10_001.0) % 50 + 3)
if rank in (1, 2):  # one message over the cable
    y = torch.full((70_000,), 7.0 * rank)
    dist.send(y, 2) if rank == 1 else dist.recv(y, 1)
    assert (y == 7.0).all()
dist.barrier()
sys.stdout.write(f"rank {rank} done\\n")
sys.stdout.flush()
if local == 0:
    for _ in range(1, per_host):
        assert os.wait()[1] == 0
os._exit(0)
"""


def sudo_run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=20)


@pytest.fixture
def hosts():
    """Process ids that hold two pairs of namespaces, and the interface of each."""
    for tool in ("ip", "unshare", "nsenter"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    cables = [f"mcp{os.getpid() % 10**7}{end}" for end in "ab"]
    holders = []
    try:
        command = ["unshare", "--net", "--ipc", "cat"]
        holders += [subprocess.Popen(command, stdin=subprocess.PIPE) for _ in cables]
        try:
            here = os.readlink("/proc/self/ns/net")
            for holder in holders:
                while os.readlink(f"/proc/{holder.pid}/ns/net") == here:
                    if holder.poll() is not None:
                        pytest.skip("namespaces are not permitted here")
            sudo_run("ip", "link", "add", cables[0], "type", "veth", "peer", "name", cables[1])
            for number, (holder, cable) in enumerate(zip(holders, cables, strict=True)):
                sudo_run("ip", "link", "set", cable, "netns", str(holder.pid))
                inside = ("nsenter", "-t", str(holder.pid), "--net", "ip")
                sudo_run(*inside, "addr", "add", f"10.83.71.{number + 1}/24", "dev", cable)
                sudo_run(*inside, "link", "set", cable, "up")
                sudo_run(*inside, "link", "set", "lo", "up")
        except (subprocess.CalledProcessError, OSError) as error:
            pytest.skip(f"no virtual cable can be made here: {error}")
        yield [(holder.pid, cable) for holder, cable in zip(holders, cables, strict=True)]
    finally:
        for holder in holders:  # the cable goes with the namespaces
            holder.kill()
            holder.communicate()


def enter(pid):
    return ["nsenter", "-t", str(pid), "--net", "--ipc"]


def place(cable):
    return ["10.83.71.1", cable]


def test_two_hosts_joined_by_a_cable(hosts):
    running = [
        subprocess.Popen(
            [
                *enter(pid),
                sys.executable,
                "-c",
                HOST,
                str(number),
                str(RANKS_PER_HOST),
                *place(cable),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number, (pid, cable) in enumerate(hosts)
    ]
    told = ""
    try:
        for process in running:
            out, err = process.communicate(timeout=PATIENCE_S)
            assert process.returncode == 0, err[-3000:]
            told += out
    finally:
        for process in running:
            process.kill()
    assert sorted(told.splitlines()) == [f"rank {rank} done" for rank in range(4)]
