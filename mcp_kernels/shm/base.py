"""The backend's process group without its calls: identity, settings, other devices."""

# torch's stubs give names to arguments of calls that it only ever makes by position.
# pyright: reportIncompatibleMethodOverride=false
from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from mcp_kernels.shm.hosts import HostsComm
from mcp_kernels.shm.local import LocalComm
from mcp_kernels.shm.rendezvous import SLOT_BYTES, find_place, join_host_group
from mcp_kernels.shm.work import DoneWork
from mcp_kernels.shm.workspace import Workspaces

if TYPE_CHECKING:
    from mcp_kernels.shm.rendezvous import Place


@dataclass(frozen=True, slots=True)
class ShmOptions:
    """What ``init_process_group(..., pg_options=ShmOptions(...))`` may set.

    Sub-groups inherit it.
    """

    slot_bytes: int = SLOT_BYTES
    """Bytes of each of a rank's two slots, whole pages: what a step of a collective can carry."""
    host_id: str | None = None
    """For tests: ranks with equal words count as one host, whatever the machine says."""


class ShmGroupBase(dist.ProcessGroup):
    """A process group without its calls: who is in it, its name, its settings.

    Args:
        store: of this group alone.
        rank: of this process in the group.
        size: ranks of the group.
        timeout: of each wait for another rank.
        name: of the group, for messages.
        options: see ``ShmOptions``.
        crowd: ranks of the whole job on this host; 0 takes those of this group.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        timeout: timedelta,
        *,
        name: str = "",
        options: ShmOptions | None = None,
        crowd: int = 0,
    ) -> None:
        super().__init__(rank, size)  # pyright: ignore[reportCallIssue, reportArgumentType]
        self._rank = rank
        self._size = size
        self.shm_options = options or ShmOptions()
        self._store = store
        self._timeout = timeout
        self._name = name
        self._desc = "undefined"
        self._made_backends: set[str] = set()
        self.place: Place = find_place(store, rank, size, self.shm_options.host_id)
        members = self.place.local_ranks
        group = join_host_group(
            store,
            self.place,
            name=name or "default",
            crowd=max(crowd, len(members)),
            timeout=timeout,
            slot_bytes=self.shm_options.slot_bytes,
        )
        self._local = LocalComm(group, self.place.local_rank, len(members))
        self._comm: LocalComm | HostsComm = self._local
        self._done = DoneWork([])
        self.workspaces = Workspaces(group, rank, size)
        # The shared memory of all its ranks, where they are several on one host.
        self.direct: LocalComm | None = self._local if 1 < size == len(members) else None
        if len(self.place.hosts) > 1:
            self._comm = HostsComm(self._local, self.place, store, rank, size, timeout)

    # torch's own answers to these take 1 us each, a tenth of a small collective.
    def rank(self) -> int:
        """Of this process in the group."""
        return self._rank

    def size(self) -> int:
        """Ranks of the group."""
        return self._size

    # --- identity -------------------------------------------------------------------------------

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        """``shm``."""
        return "shm"

    def name(self) -> str:
        """``shm``."""
        return "shm"

    @property
    def group_name(self) -> str:
        """Name under which torch finds this group."""
        return self._name

    @property
    def pg_name(self) -> str:
        """As ``group_name``."""
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name
        super()._set_group_name(name)  # pyright: ignore[reportArgumentType]

    @property
    def group_desc(self) -> str:
        """What torch says this group is for."""
        return self._desc

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    @property
    def supports_splitting(self) -> bool:
        """False: a sub-group meets anew."""
        return False

    @property
    def supports_coalescing(self) -> bool:
        """False: calls are answered one by one."""
        return False

    def _get_backend(self, device: torch.device) -> Any:
        return self if device.type == "cpu" else self._backend_for(device)

    def _backend_for(self, device: torch.device) -> Any:
        """The backend of another device, made at its first use."""
        if device.type not in self._made_backends:
            if device.type != "cuda" or not dist.is_nccl_available():
                raise RuntimeError(
                    f"shm: tensors must be on the CPU or, with NCCL, on CUDA, got {device}"
                )
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = self._timeout
            backend = dist.ProcessGroupNCCL(
                dist.PrefixStore("cuda/", self._store), self.rank(), self.size(), options
            )
            backend._set_sequence_number_for_group()
            self._register_backend(
                torch.device(device.type), dist.ProcessGroup.BackendType.NCCL, backend
            )
            self._made_backends.add(device.type)
        return super()._get_backend(device)

    def _elsewhere(self, x: Tensor, call: str, *args: Any) -> Any:
        """Answer a call for a tensor of another device by that device's backend."""
        self._backend_for(x.device)
        return getattr(super(), call)(*args)

    # --- state ----------------------------------------------------------------------------------

    def set_timeout(self, timeout: timedelta) -> None:
        """Of each wait from now on."""
        self._timeout = timeout
        self._local.group.set_timeout(timeout.total_seconds())

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self.set_timeout(timeout)

    def abort(self) -> None:
        """End the group on every rank of this host; calls in flight raise."""
        self._local.group.abort(f"rank {self.rank()} aborted group {self._name}")

    def shutdown(self) -> None:
        """Nothing: memory goes with the last reference, and names are gone since the start."""

    def _set_sequence_number_for_group(self) -> None:
        """Numbers start at 1 on every rank by themselves."""

    def _get_sequence_number_for_group(self) -> int:
        return self._local.group.calls

    def _has_hooks(self) -> bool:
        return False

    def _enable_collectives_timing(self) -> None:
        """Nothing to time: calls return when they are done."""

    def _wait_for_pending_works(self) -> None:
        """Nothing: collectives are complete when their call returns."""

    def _start_coalescing(self, device: torch.device) -> None:
        """Nothing: each call between start and end is answered at once."""

    def _end_coalescing(self, device: torch.device) -> DoneWork:
        return self._done
