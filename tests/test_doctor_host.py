"""The doctor on machines that are not this one: recorded tables of GPU links, trees of /sys."""

from __future__ import annotations

import json
import subprocess

import pytest

from mcp_parallel.cli.main import main
from mcp_parallel.doctor import (
    Finding,
    allocator,
    devices,
    env_file,
    examine,
    gpu_links,
    host,
    machine,
)
from mcp_parallel.doctor.finding import note
from mcp_parallel.errors import BAD_CONFIG, OK

# --- nvidia-smi topo -m --------------------------------------------------------------------------

LEGEND = """
Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes
  NODE = Connection traversing PCIe as well as the interconnect within a NUMA node
  PHB  = Connection traversing PCIe as well as a PCIe Host Bridge
  PXB  = Connection traversing multiple PCIe bridges
  PIX  = Connection traversing at most a single PCIe bridge
  NV#  = Connection traversing a bonded set of # NVLinks
"""


def table(rows, extra, last=("CPU Affinity", "NUMA Affinity", "GPU NUMA ID"), legend=""):
    """The tool's text: names underlined, cells by tabs; ``extra`` ends the rows of GPUs."""
    names = [row.split()[0] for row in rows]
    head = "\t".join(f"\x1b[4m{name}\x1b[0m" for name in (*names, *last))
    lines = [f"\t{head}"]
    for row, end in zip(rows, [*extra, *[""] * (len(rows) - len(extra))], strict=True):
        name, *cells = row.split()
        lines.append("\t".join([name, *(f" {c} " if c == "X" else c for c in cells), end]))
    return "\n".join(lines) + "\n" + LEGEND + legend


def dgx(nvlink, near, cores):
    """Eight GPUs behind switches of NVLink, four on each socket, a card beside each GPU."""
    rows, extra = [], []
    for gpu in range(8):
        others = ["X" if other == gpu else nvlink for other in range(8)]
        cards = [near if c == gpu else "NODE" if c // 4 == gpu // 4 else "SYS" for c in range(8)]
        rows.append(f"GPU{gpu} {' '.join(others)} {' '.join(cards)}")
        extra.append(f"{cores[gpu // 4]}\t{gpu // 4}\t\tN/A")
    for card in range(8):
        gpus = [near if g == card else "NODE" if g // 4 == card // 4 else "SYS" for g in range(8)]
        cards = ["X" if c == card else "NODE" if c // 4 == card // 4 else "SYS" for c in range(8)]
        rows.append(f"NIC{card} {' '.join(gpus)} {' '.join(cards)}")
    named = "".join(f"\n  NIC{card}: mlx5_{card}" for card in range(8))
    return table(rows, extra, legend=f"\nNIC Legend:\n{named}\n")


DGX_A100 = dgx("NV12", "PXB", ("0-63,128-191", "64-127,192-255"))
DGX_H100 = dgx("NV18", "PIX", ("0-55,112-167", "56-111,168-223"))
# Four cards in two bridged pairs, one on each socket; the older form names InfiniBand cards itself.
BRIDGED = table(
    [
        "GPU0 X NV4 SYS SYS NODE",
        "GPU1 NV4 X SYS SYS NODE",
        "GPU2 SYS SYS X NV4 SYS",
        "GPU3 SYS SYS NV4 X SYS",
        "mlx5_0 NODE NODE SYS SYS X",
    ],
    ["0-31\t0", "0-31\t0", "32-63\t1", "32-63\t1"],
    last=("CPU Affinity", "NUMA Affinity"),
)
# A desktop with two consumer cards.
PCIE = table(["GPU0 X PHB", "GPU1 PHB X"], ["0-63\t0\t\tN/A", "0-63\t0\t\tN/A"])
# A guest whose hypervisor hides sockets; and one GPU alone.
GUEST = table(["GPU0 X PHB PHB", "GPU1 PHB X PHB", "NIC0 PHB PHB X"], ["0-15\t\tN/A"] * 2)
ALONE = table(["GPU0 X"], ["0-7\t0\t\tN/A"])


def by_topic(findings) -> dict[str, Finding]:
    return {finding.topic: finding for finding in findings}


@pytest.mark.parametrize(
    "text, nvlink, near", [(DGX_A100, "NV12", "PXB"), (DGX_H100, "NV18", "PIX")]
)
def test_a_dgx(text, nvlink, near):
    links = gpu_links.parse_links(text)
    assert links.gpus == tuple(f"GPU{gpu}" for gpu in range(8))
    assert links.cards == tuple(f"mlx5_{card}" for card in range(8))
    assert links.links["GPU2", "GPU2"] == "X"
    assert links.links["GPU0", "GPU7"] == nvlink
    assert (links.links["GPU5", "mlx5_5"], links.links["GPU5", "mlx5_0"]) == (near, "SYS")
    assert links.numa == {f"GPU{gpu}": gpu // 4 for gpu in range(8)}
    assert links.islands() == [links.gpus]
    assert [links.nearest_card(gpu) for gpu in links.gpus] == [
        (f"mlx5_{g}", near) for g in range(8)
    ]
    found = by_topic(gpu_links.link_findings(text))
    assert found["GPU links"].value == f"NVLink joins all 8 ({nvlink}): tp up to 8"
    assert (found["GPU links"].status, found["GPU to network"].status) == ("ok", "ok")
    assert "--numa-binding node" in found["GPU and socket"].advice


def test_bridged_pairs():
    links = gpu_links.parse_links(BRIDGED)
    assert links.islands() == [("GPU0", "GPU1"), ("GPU2", "GPU3")]
    assert links.cards == ("mlx5_0",)
    assert links.nearest_card("GPU2") == ("mlx5_0", "SYS")
    found = by_topic(gpu_links.link_findings(BRIDGED))
    assert found["GPU links"].value == "NVLink joins GPU0 GPU1 | GPU2 GPU3"
    assert found["GPU links"].wanted.endswith("tp up to 2")
    assert found["GPU to network"].status == "note"
    assert found["GPU and socket"].value == "NUMA nodes 0: GPU0 GPU1, 1: GPU2 GPU3"


def test_pcie_alone_is_no_place_for_tensor_parallelism():
    found = by_topic(gpu_links.link_findings(PCIE))
    assert list(found) == ["GPU links"]
    assert found["GPU links"].status == "note"
    assert found["GPU links"].value == "no NVLink; PHB (the processor's PCIe bridge)"


def test_guests_and_single_gpus():
    links = gpu_links.parse_links(GUEST)
    assert links.numa == {}
    assert links.nearest_card("GPU1") == ("NIC0", "PHB")
    assert list(gpu_links.link_findings(ALONE)) == []
    assert list(gpu_links.link_findings(None)) == []


def test_a_table_that_is_none_or_cut_off_is_no_crash():
    with pytest.raises(ValueError, match="must print a table of GPUs, got none"):
        gpu_links.parse_links("NVIDIA-SMI has failed\n")
    cut = DGX_H100.replace("GPU3\tNV18\tNV18", "GPU3\tNV18", 1)
    with pytest.raises(
        ValueError, match="row GPU3 of nvidia-smi topo -m must have 16 links, got 15"
    ):
        gpu_links.parse_links(cut)
    (finding,) = gpu_links.link_findings("garbage")
    assert finding.status == "ok"
    assert finding.value.startswith("unknown: ")


def test_the_tool_is_asked(tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu_links.read_links() is None
    tool.write_text("#!/bin/sh\n[ \"$1 $2\" = 'topo -m' ] && echo table\n")
    tool.chmod(0o755)
    assert gpu_links.read_links() == "table\n"
    tool.write_text("#!/bin/sh\nexit 9\n")
    assert gpu_links.read_links() is None


# --- /sys and /proc ------------------------------------------------------------------------------


def tree(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


SERVER = {
    "sys/devices/system/node/node0/cpulist": "0-31,64-95",
    "sys/devices/system/node/node1/cpulist": "32-63,96-127",
    "sys/devices/system/node/node2/cpulist": "",  # memory without cores
    "proc/sys/kernel/numa_balancing": "1",
    "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "powersave",
    "sys/devices/system/cpu/cpu1/cpufreq/scaling_governor": "performance",
    "sys/class/net/lo/operstate": "unknown",
    "sys/class/net/eth0/operstate": "up",
    "sys/class/net/eth0/speed": "100000",
    "sys/class/net/eth0/mtu": "1500",
    "sys/class/net/eth1/operstate": "down",
    "sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE",
    "sys/class/infiniband/mlx5_0/ports/1/rate": "400 Gb/sec (4X NDR)",
    "sys/class/infiniband/mlx5_0/ports/1/link_layer": "InfiniBand",
    "sys/class/infiniband/mlx5_1/ports/1/state": "1: DOWN",
    "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue",
    "proc/modules": "nvidia 1 0 - Live 0x0",
}


def test_a_server_is_looked_over(tmp_path):
    found = by_topic(host.host_findings(tree(tmp_path, SERVER)))
    assert found["NUMA"].value == "2 nodes (0: cores 0-31,64-95, 1: cores 32-63,96-127)"
    assert found["NUMA balancing"].status == "note"
    assert found["CPU governor"].value == "performance, powersave"
    assert found["card eth0"].value == "100 Gb/s, packets of 1500 bytes"
    assert found["card eth0"].wanted == "packets of 9000 bytes"
    assert found["port mlx5_0/1"].value == "InfiniBand 400 Gb/sec (4X NDR)"
    assert found["InfiniBand"].value == "not active: mlx5_1/1 DOWN"
    assert found["GPUDirect RDMA"].status == "note"
    assert "card eth1" not in found


def test_a_server_as_it_should_be(tmp_path):
    changes = {
        "proc/sys/kernel/numa_balancing": "0",
        "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "performance",
        "sys/class/net/eth0/mtu": "9000",
        "sys/class/infiniband/mlx5_1/ports/1/state": "4: ACTIVE",
        "proc/modules": "nvidia_peermem 1 0 - Live 0x0",
    }
    findings = list(host.host_findings(tree(tmp_path, SERVER | changes)))
    assert [finding.topic for finding in findings if finding.status != "ok"] == []


def test_a_slow_network_and_an_empty_tree(tmp_path):
    slow = {"sys/class/net/eth0/operstate": "up", "sys/class/net/eth0/speed": "1000"}
    found = by_topic(host.host_findings(tree(tmp_path / "slow", slow)))
    assert found["network"].value == "1 Gb/s at most"
    assert list(host.host_findings(tmp_path / "none")) == []
    assert host.driver_version(tmp_path / "none") is None


def test_every_port_down_is_another_matter(tmp_path):
    ports = {f"sys/class/infiniband/mlx5_{n}/ports/1/state": "1: DOWN" for n in range(2)}
    (finding,) = host.host_findings(tree(tmp_path, ports))
    assert finding.value.startswith("no port is active: mlx5_0/1 DOWN")


def test_the_driver_must_fit_the_cuda_of_torch(tmp_path):
    assert host.driver_version(tree(tmp_path, SERVER)) == "550.54.15"
    assert devices.driver_finding("550.54.15", "12.8").status == "ok"
    assert devices.driver_finding("550.54.15", "13.0").wanted == "580 or newer, for CUDA 13.0"
    assert devices.driver_finding(None, "12.8").status == "note"


def test_limits_and_shared_memory_of_another_root(tmp_path):
    assert machine.open_files_finding(-1, -1).status == "ok"
    assert machine.open_files_finding(1 << 20, 1 << 20).status == "ok"
    low = machine.open_files_finding(1024, 1 << 20)
    assert low.fix is not None
    assert low.fix.text == "ulimit -S -n 4096"
    assert machine.open_files_finding(1024, 1024).fix is None  # nothing that this user may do
    tree(
        tmp_path,
        {
            "sys/class/infiniband/x/y": "",
            "sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]",
        },
    )
    (tmp_path / "dev/shm").mkdir(parents=True)
    found = by_topic(machine.memory_findings(tmp_path))
    assert found["huge pages"].status == "note"
    assert str(tmp_path) in found["shared memory"].value


def test_host_allocators(tmp_path):
    def findings(cores=4, **environ):
        return list(allocator.host_allocator_findings(environ, cores, tmp_path))

    assert [f.status for f in findings()] == ["ok"]
    (many,) = findings(cores=128)
    assert many.value == "glibc, up to 1024 arenas"
    assert [f.status for f in findings(cores=128, MALLOC_ARENA_MAX="8")] == ["ok"]
    gone = findings(LD_PRELOAD="/opt/libjemalloc.so.2")[0]
    assert gone.fix is not None
    assert gone.fix.text == "unset LD_PRELOAD"
    tree(tmp_path, {"usr/lib/x86_64-linux-gnu/libtcmalloc.so.4": ""})
    assert "LD_PRELOAD=/usr/lib/x86_64-linux-gnu/libtcmalloc.so.4" in findings(cores=128)[0].advice
    (loaded,) = findings(cores=128, LD_PRELOAD="/usr/lib/x86_64-linux-gnu/libtcmalloc.so.4")
    assert loaded.value == "libtcmalloc.so.4, preloaded"


def test_all_of_it_on_another_machine(tmp_path):
    tree(
        tmp_path,
        SERVER | {"proc/cpuinfo": "flags : avx2\n", "proc/meminfo": "MemAvailable: 1048576 kB"},
    )
    environ = {"NCCL_P2P_DISABLE": "1", "PYTORCH_CUDA_ALLOC_CONF": "x:1"}
    found = by_topic(examine(environ, tmp_path, lambda: DGX_H100))
    assert found["memory"].value == "1.0 GiB available"
    assert found["GPU links"].status == "ok"
    assert found["NCCL_P2P_DISABLE"].status == "note"
    assert found["processor"].value.endswith(": avx2")


# --- --fix ---------------------------------------------------------------------------------------


def sourced(text, names, **environ):
    """The variables ``names`` after a POSIX shell has read ``text``."""
    ask = "; ".join(f'echo "{name}=${{{name}-UNSET}}"' for name in names)
    done = subprocess.run(
        ["sh", "-eu", "-c", f"{text}\n{ask}"],
        env=environ,
        capture_output=True,
        text=True,
        check=True,
    )
    return dict(line.split("=", 1) for line in done.stdout.splitlines())


def test_the_file_mends_what_was_found_when_a_shell_reads_it(tmp_path):
    environ = {
        "NCCL_P2P_DISABLE": "1",
        "NCCL_DEBUG": "INFO",
        "NCCL_ASYNC_ERROR_HANDLING": "1",
        "GLOO_SOCKET_IFNAME": "eth99",
        "OMP_NUM_THREADS": "9999",
        "NCCL_ALGO": "Ring",  # a choice that someone may have measured: told, not touched
    }
    findings = examine(environ, tmp_path, lambda: None)
    text = env_file.env_file_text(findings)
    assert text.isascii()
    code = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert all(line.startswith(("export ", "unset ", "ulimit -S ")) for line in code)
    for line, before in zip(text.splitlines()[1:], text.splitlines(), strict=False):
        assert line.startswith("#") or not line or before.startswith("# "), f"why {line}?"
    names = [*environ, "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"]
    after = sourced(text, names, **environ)
    assert after == {
        "NCCL_P2P_DISABLE": "UNSET",
        "NCCL_DEBUG": "WARN",
        "NCCL_ASYNC_ERROR_HANDLING": "UNSET",
        "GLOO_SOCKET_IFNAME": "UNSET",
        "OMP_NUM_THREADS": "UNSET",
        "NCCL_ALGO": "Ring",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    mended = {name: value for name, value in after.items() if value != "UNSET"}
    left = [f.topic for f in examine(mended, tmp_path, lambda: None) if f.fix is not None]
    assert left == []


def test_a_variable_that_the_user_chose_stays(tmp_path):
    text = env_file.env_file_text([])
    assert sourced(text, ["TORCH_FR_BUFFER_SIZE"]) == {"TORCH_FR_BUFFER_SIZE": "2000"}
    chosen = sourced(text, ["TORCH_FR_BUFFER_SIZE"], TORCH_FR_BUFFER_SIZE="7")
    assert chosen == {"TORCH_FR_BUFFER_SIZE": "7"}


def test_a_file_is_never_replaced_unasked(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("mcp_parallel.doctor.examine", lambda: [Finding("a", "ok", "b")])
    path = tmp_path / "env.sh"
    assert main(["doctor", "--fix", str(path)]) == OK
    assert f"{path}: 2 settings" in capsys.readouterr().out
    written = path.read_text()
    path.write_text("mine")
    assert main(["doctor", "--fix", str(path)]) == BAD_CONFIG
    assert "add --force to replace it" in capsys.readouterr().err
    assert path.read_text() == "mine"
    assert main(["doctor", "--fix", str(path), "--force", "--json"]) == OK
    json.loads(capsys.readouterr().out)
    assert path.read_text() == written
    assert main(["doctor", "--fix", str(tmp_path / "no" / "env.sh")]) == BAD_CONFIG
    assert "choose another folder" in capsys.readouterr().err


def test_a_finding_without_its_reason_cannot_be_made():
    with pytest.raises(AssertionError, match="what is wanted, why, and how"):
        Finding("a", "note", "b", "do c")
    assert note("a", "b", wanted="c", why="d", how="e").status == "note"
