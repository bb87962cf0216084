"""How ranks find each other: who shares memory with whom, then one compiled group a host."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from mcp_kernels import _shm

PAGE = 4096
# A rank's memory in a group is two slots and W rings: 1.5 MiB. Slots of 512 KiB to 4 MiB ran alike;
# 512 KiB at two ranks keep the whole exchange in a 2 MiB cache.
SLOT_BYTES = 512 << 10
RINGS_BYTES = 512 << 10
_MAX_RING = 256 << 10
_FAILED = "!"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank stands."""

    hosts: tuple[tuple[int, ...], ...]
    """The group's ranks by host; hosts in the order of their first rank."""
    host: int
    local_rank: int

    @property
    def local_ranks(self) -> tuple[int, ...]:
        """Ranks of this host, in order."""
        return self.hosts[self.host]


def find_place(store: dist.Store, rank: int, world: int, host_id: str | None) -> Place:
    """Exchange host identities through ``store``.

    Args:
        store: of this group alone.
        rank: of this process in the group.
        world: ranks of the group.
        host_id: stands in for ``_shm.host_id()``, so that tests can play several hosts.

    Cost: two requests to the store.
    """
    store.set(f"host/{rank}", host_id or _shm.host_id())
    ids = _get_all(store, "host", range(world))
    hosts: dict[str, list[int]] = {}
    for peer, name in enumerate(ids):
        hosts.setdefault(name, []).append(peer)
    ranks = tuple(tuple(members) for members in hosts.values())
    host = next(index for index, members in enumerate(ranks) if rank in members)
    return Place(ranks, host, ranks[host].index(rank))


def join_host_group(
    store: dist.Store, place: Place, *, name: str, crowd: int, timeout: timedelta, slot_bytes: int
) -> _shm.Group:
    """The compiled group of this host's ranks.

    Every rank creates its segment under a name that says whose it is and holds 128 random bits,
    learns the others' names from the store and maps them; then the names go. When any of that
    fails on a rank, the others learn it, and each takes away every name it knows.

    Args:
        store: of the whole group.
        place: of this rank.
        name: of the group, for messages.
        crowd: ranks of the job on this host.
        timeout: of each wait.
        slot_bytes: of each of the two slots.

    Raises:
        OSError: /dev/shm cannot hold this rank's segment.
        RuntimeError: another rank failed to start.
    """
    rank, members = place.local_rank, place.local_ranks
    if rank == 0:
        _shm.remove_orphans()
    key = f"segment/{place.host}"
    try:
        group = _shm.Group(
            name=name,
            token=secrets.token_hex(16),
            rank=rank,
            world=len(members),
            slot_bytes=max(slot_bytes, PAGE * -(-64 * len(members) // PAGE)),
            ring_bytes=_ring_bytes(len(members)),
            crowd=crowd,
            timeout_s=timeout.total_seconds(),
        )
    except OSError as error:
        store.set(f"{key}/{rank}", f"{_FAILED}{error}")
        raise OSError(
            error.errno,
            f"shm: {error.strerror}; enlarge /dev/shm (docker run --shm-size=1g), or choose gloo",
        ) from error
    store.set(f"{key}/{rank}", group.segment_name)
    names: list[str] = []
    try:
        names = _get_all(store, key, range(len(members)))
        failures = [text for text in names if text.startswith(_FAILED)]
        if failures:
            raise RuntimeError(f"shm: another rank of this host could not start: {failures[0][1:]}")
        group.connect(names)
    except BaseException:
        # This rank's own, even while the error keeps the group alive; those of ranks that live, who
        # fail too or are about to; those of ranks that died on the way before they told a name.
        known = [text for text in names if not text.startswith(_FAILED)]
        _shm.Group.remove([group.segment_name, *known])
        _shm.remove_orphans()
        raise
    return group


def _ring_bytes(world: int) -> int:
    """A power of two: all of a rank's rings together take about RINGS_BYTES."""
    share = max(PAGE, min(_MAX_RING, RINGS_BYTES // world))
    return 1 << (share.bit_length() - 1)


def _get_all(store: dist.Store, key: str, ranks: range) -> list[str]:
    return [value.decode() for value in store.multi_get([f"{key}/{rank}" for rank in ranks])]
