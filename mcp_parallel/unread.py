"""Rows that cannot be read while a run trains: all ranks end it together, with one message.

A rank alone cannot leave a step, for the others would wait for it. It takes part with padding, the
sum of the step's totals tells all, nothing is updated, and what was trained so far is saved.
"""

from __future__ import annotations

import sys

import numpy as np
import torch
import torch.distributed as dist

from mcp_parallel.config import Config
from mcp_parallel.data.ahead import Batch
from mcp_parallel.data.prepare.index import TokenFileError
from mcp_parallel.data.storage import StorageError
from mcp_parallel.errors import BAD_CONFIG, FAILED
from mcp_parallel.model.loss import IGNORED
from mcp_parallel.parallel.mesh import Mesh

UNREADABLE = (TokenFileError, StorageError, OSError)
"""What reading the rows of a batch raises when it is the data's fault."""


def padding_batch(config: Config, num_rows: int) -> Batch:
    """Rows of text without a target."""
    shape = num_rows, config.model.seq_len
    inputs = np.zeros(shape, dtype=np.int64)
    documents = np.zeros_like(inputs) if config.data.document_masking else None
    return Batch(inputs, np.full_like(inputs, IGNORED), documents)


def end_unread(error: Exception | None, mesh: Mesh) -> int:
    """Say why a run ends, once; collective over the mesh.

    Args:
        error: of this rank, or None; some rank has one.
        mesh: this rank's.

    Returns:
        The exit status, the same on all ranks: that of a bad configuration where the bytes are not
        what was written, which another try does not change; of a failure where a storage or a disk
        did not give them.
    """
    rank, world = 0, 1
    if mesh.world is not None:
        rank, world = dist.get_rank(), mesh.layout.world_size
    statuses = torch.zeros(world, dtype=torch.float64)
    if error is not None:
        statuses[rank] = BAD_CONFIG if isinstance(error, TokenFileError) else FAILED
    if mesh.world is not None:
        statuses = statuses.to(mesh.device)
        dist.all_reduce(statuses, group=mesh.world)
    first, status = next((at, int(one)) for at, one in enumerate(statuses.tolist()) if one)
    if rank == first:
        text = str(error)
        sys.stderr.write(f"{text if text.startswith('data: ') else f'data: {text}'}\n")
        sys.stderr.flush()
    return status
