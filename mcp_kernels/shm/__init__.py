"""torch.distributed backend "shm": ranks of one host talk through memory that they share.

Importing this module registers the backend, for CPU tensors::

    import mcp_kernels.shm
    torch.distributed.init_process_group("cpu:shm,cuda:nccl")   # or just "shm"

It serves DDP, FSDP2, DTensor, pipelining and distributed checkpoints, world and sub-groups of any
size. A collective is done when its call returns, with ``async_op=True`` too; sends and receives
complete later. Ranks of several hosts use shared memory inside each host and gloo between hosts.

A rank that dies, hangs or makes another call than the others is an error on all ranks, which names
the call and the rank; the group cannot be used afterwards.
"""

from __future__ import annotations

import torch.distributed as dist

from mcp_kernels.shm.base import ShmOptions
from mcp_kernels.shm.process_group import ShmProcessGroup, create_process_group

__all__ = ["ShmOptions", "ShmProcessGroup"]

if not hasattr(dist.Backend, "SHM"):
    dist.Backend.register_backend("shm", create_process_group, extended_api=True, devices=["cpu"])
