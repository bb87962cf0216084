"""CUDA devices and how their memory is allocated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from mcp_parallel.doctor.finding import Finding, export, note

_EXPANDABLE = "expandable_segments:True"
# Least driver branch for each major version of CUDA: NVIDIA's CUDA compatibility guide.
_DRIVER_FLOORS = {11: 450, 12: 525, 13: 580}


def device_findings(environ: Mapping[str, str], driver: str | None = None) -> Iterator[Finding]:
    """The devices that ranks would take, their driver, and the allocator's settings.

    Args:
        environ: of the ranks.
        driver: version of the kernel module, None where there is none.
    """
    try:
        import torch
    except ImportError:
        return
    if torch.version.cuda is None:
        yield Finding("CUDA", "ok", "none: this torch is built for the CPU")
        return
    yield driver_finding(driver, torch.version.cuda)
    if not torch.cuda.is_available():
        hidden = environ.get("CUDA_VISIBLE_DEVICES")
        yield note(
            "CUDA",
            f"torch is built for CUDA {torch.version.cuda}, and sees no device",
            wanted="a device for each rank",
            why="ranks train on the CPU",
            how=f"CUDA_VISIBLE_DEVICES={hidden!r} may hide them"
            if hidden is not None
            else "look at nvidia-smi; the driver must be as new as this torch's CUDA",
        )
        return
    count = torch.cuda.device_count()
    for index in range(count):
        device = torch.cuda.get_device_properties(index)
        memory_gib = device.total_memory / 2**30
        capability = f"{device.major}.{device.minor}"
        yield Finding(f"cuda:{index}", "ok", f"{device.name}, {memory_gib:.0f} GiB, {capability}")
    if environ.get("MCP_DEVICE", "").lower() == "cpu":
        yield note(
            "MCP_DEVICE",
            "cpu",
            wanted="unset",
            why="ranks stay off the devices",
            how="unset it to train on the devices",
        )
    yield allocator_finding(environ)


def driver_finding(driver: str | None, cuda: str) -> Finding:
    """Judge the driver's version, such as ``535.104.05``, by the CUDA that torch is built for."""
    floor = _DRIVER_FLOORS.get(int(cuda.split(".")[0]), max(_DRIVER_FLOORS.values()))
    if driver is None:
        return note(
            "driver",
            "none loaded",
            wanted=f"NVIDIA {floor} or newer, for CUDA {cuda}",
            why="without it there is no device",
            how="install the driver, or train on the CPU",
        )
    if int(driver.split(".")[0]) < floor:
        return note(
            "driver",
            driver,
            wanted=f"{floor} or newer, for CUDA {cuda}",
            why="older ones cannot run this torch's kernels without a compatibility package",
            how="update the driver, or install a torch for an older CUDA",
        )
    return Finding("driver", "ok", driver)


def allocator_finding(environ: Mapping[str, str]) -> Finding:
    """Judge the settings of torch's CUDA allocator."""
    new, old = environ.get("PYTORCH_ALLOC_CONF"), environ.get("PYTORCH_CUDA_ALLOC_CONF")
    found = new if new is not None else old
    if not found:
        return note(
            "allocator",
            "defaults",
            wanted=f"PYTORCH_ALLOC_CONF={_EXPANDABLE}",
            why="batches of changing length leave holes in memory",
            how=f"set PYTORCH_ALLOC_CONF={_EXPANDABLE}",
            fix=export("PYTORCH_ALLOC_CONF", _EXPANDABLE, "fewer holes in GPU memory"),
        )
    if new is None:
        return note(
            "allocator",
            found,
            wanted="the same in PYTORCH_ALLOC_CONF",
            why="the old name goes away",
            how="rename PYTORCH_CUDA_ALLOC_CONF to PYTORCH_ALLOC_CONF",
            fix=export(
                "PYTORCH_ALLOC_CONF", "$PYTORCH_CUDA_ALLOC_CONF", "the old name is deprecated"
            ),
        )
    if old is not None and old != new:
        return note(
            "allocator",
            found,
            wanted="one setting",
            why="PYTORCH_CUDA_ALLOC_CONF differs from PYTORCH_ALLOC_CONF",
            how="unset PYTORCH_CUDA_ALLOC_CONF",
        )
    return Finding("allocator", "ok", found)
