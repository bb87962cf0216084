"""CUDA devices and how their memory is allocated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from mcp_parallel.doctor.finding import Finding


def device_findings(environ: Mapping[str, str]) -> Iterator[Finding]:
    """The devices that ranks would take, and the allocator's settings where there are any."""
    try:
        import torch
    except ImportError:
        return
    if torch.version.cuda is None:
        yield Finding("CUDA", "ok", "none: this torch is built for the CPU")
        return
    if not torch.cuda.is_available():
        hidden = environ.get("CUDA_VISIBLE_DEVICES")
        advice = (
            f"CUDA_VISIBLE_DEVICES={hidden!r} may hide them"
            if hidden is not None
            else "look at nvidia-smi; the driver must be as new as this torch's CUDA"
        )
        yield Finding("CUDA", "note", f"torch is built for CUDA {torch.version.cuda}", advice)
        return
    count = torch.cuda.device_count()
    for index in range(count):
        device = torch.cuda.get_device_properties(index)
        memory_gib = device.total_memory / 2**30
        capability = f"{device.major}.{device.minor}"
        yield Finding(f"cuda:{index}", "ok", f"{device.name}, {memory_gib:.0f} GiB, {capability}")
    if environ.get("MCP_DEVICE", "").lower() == "cpu":
        yield Finding("MCP_DEVICE", "note", "cpu", "unset it to train on the devices")
    yield allocator_finding(environ)


def allocator_finding(environ: Mapping[str, str]) -> Finding:
    """Judge the settings of torch's CUDA allocator."""
    new, old = environ.get("PYTORCH_ALLOC_CONF"), environ.get("PYTORCH_CUDA_ALLOC_CONF")
    found = new if new is not None else old
    if not found:
        advice = (
            "set PYTORCH_ALLOC_CONF=expandable_segments:True: batches of changing length leave "
            "fewer holes in memory"
        )
        return Finding("allocator", "note", "defaults", advice)
    if new is None:
        advice = "rename PYTORCH_CUDA_ALLOC_CONF to PYTORCH_ALLOC_CONF: the old name goes away"
        return Finding("allocator", "note", found, advice)
    if old is not None and old != new:
        advice = "unset PYTORCH_CUDA_ALLOC_CONF: it differs from PYTORCH_ALLOC_CONF"
        return Finding("allocator", "note", found, advice)
    return Finding("allocator", "ok", found)
