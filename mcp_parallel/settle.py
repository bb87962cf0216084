"""``measured`` turned into numbers at the start of a run: timed, agreed on, written down.

The run folder's ``balance.json`` keeps what was found, so that a run that is resumed at the same
layout goes on with the same split and shares, whatever else its machines are doing at the time.
``remeasured`` looks at the machines again.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mcp_parallel.check import check
from mcp_parallel.config import Config
from mcp_parallel.division import MEASURED, is_settled, listed, stage_layers
from mcp_parallel.layout import Layout
from mcp_parallel.parallel.layer_times import measure_layers
from mcp_parallel.parallel.mesh import Mesh
from mcp_parallel.planner.balance import LayerCosts, choose_shares, rank_costs, split_by_cost
from mcp_parallel.rules.batch import microbatch_rule

FILE = "balance.json"
# Equal shares stay where others would gain less: two such times of like ranks differ as much.
_WORTH = 0.05


@dataclass(frozen=True)
class Found:
    """What the ranks agreed on; None where it was not to be measured."""

    stage_split: tuple[int, ...] | None
    dp_shares: tuple[int, ...] | None

    def applied(self, config: Config) -> Config:
        """``config`` with numbers in place of the words for them."""
        parallel = config.parallel
        if self.stage_split is not None:
            parallel = replace(parallel, stage_split=listed(self.stage_split))
        if self.dp_shares is not None:
            parallel = replace(parallel, dp_shares=listed(self.dp_shares))
        return replace(config, parallel=parallel)


def settle(config: Config, mesh: Mesh, run_dir: Path) -> Config:
    """The config with its stage split and shares as numbers. Collective over the mesh.

    Args:
        config: the run, checked.
        mesh: this rank's, of the run's layout.
        run_dir: whose ``balance.json`` rank 0 reads, and writes when it measured.

    Raises:
        ValueError: the file is broken.
        ConfigError: it holds numbers that cannot run.
    """
    if is_settled(config):
        return config
    wanted = _Wanted.of(config)
    is_main = mesh.layout.rank_of(mesh.coordinate) == 0
    found = wanted.recorded(run_dir / FILE) if is_main else None
    found = _from_rank_0(found, wanted, mesh)
    if found is None:
        times = _all_times(measure_layers(config, mesh), mesh)
        found = choose(config, times)
        if is_main:
            _write(run_dir / FILE, {**wanted.key, **_plain(found), "seconds": _seconds(times)})
            sys.stdout.write(_line(found))
    settled = found.applied(config)
    check(settled)  # a record is a file, and files get edited
    return settled


def choose(config: Config, times: Sequence[LayerCosts]) -> Found:
    """Split and shares that suit the ranks' times; a pure function.

    A pipeline rank is as slow as the slowest of its ranks, and a replica as its slowest rank.

    Args:
        config: the run, checked.
        times: of each rank of the layout, seconds.
    """
    layout, parallel = Layout.from_config(config.parallel), config.parallel
    places = [layout.coordinate(rank) for rank in range(layout.world_size)]
    split: list[int] | None = None
    if parallel.stage_split in MEASURED and layout.pp > 1:
        blocks = [
            max(t.block for t, place in zip(times, places, strict=True) if place.pp == pp)
            for pp in range(layout.pp)
        ]
        slowness = [block / min(blocks) for block in blocks]
        # Relative to a block on the same rank: what differs between ranks is in their slowness.
        costs = LayerCosts(
            embedding=statistics.median(t.embedding / t.block for t in times),
            block=1.0,
            head=statistics.median(t.head / t.block for t in times),
        )
        split = split_by_cost(config.model.num_layers, layout, costs, slowness)
    shares: tuple[int, ...] | None = None
    if parallel.dp_shares in MEASURED and layout.dp > 1:
        counts = split or [len(layers) for layers in stage_layers(config)]
        paces = [
            max(
                rank_costs(counts, layout, t)[place.pp]
                for t, place in zip(times, places, strict=True)
                if place.dp == dp
            )
            for dp in range(layout.dp)
        ]
        shares = _shares(config, paces)
    return Found(None if split is None else tuple(split), shares)


def _shares(config: Config, paces: Sequence[float]) -> tuple[int, ...]:
    """Micro-batches of each replica by the seconds that one takes it."""
    units = config.train.global_batch_size // config.train.micro_batch_size
    step, least = microbatch_rule(config.parallel)
    chosen = choose_shares([1 / pace for pace in paces], units, step=step, least=least)
    equal, rest = divmod(units, len(paces))
    if rest == 0 and equal % step == 0:
        gain = equal * max(paces) / max(n * pace for n, pace in zip(chosen, paces, strict=True))
        if gain < 1 + _WORTH:
            return (equal,) * len(paces)
    return chosen


@dataclass(frozen=True)
class _Wanted:
    """What is to be found, and all that a record must have been made for to be used."""

    key: dict[str, Any]
    num_stages: int
    num_replicas: int
    anew: bool

    @classmethod
    def of(cls, config: Config) -> _Wanted:
        parallel, train, layout = config.parallel, config.train, Layout.from_config(config.parallel)
        key = {
            "model": config.fingerprint(),
            "layout": {axis: getattr(layout, axis) for axis in ("dp", "tp", "pp", "cp")},
            "schedule": parallel.schedule,
            "stages": layout.num_stages,
        }
        if parallel.dp_shares in MEASURED:
            key["microbatches"] = train.global_batch_size // train.micro_batch_size
        return cls(
            key=key,
            num_stages=layout.num_stages
            if parallel.stage_split in MEASURED and layout.pp > 1
            else 0,
            num_replicas=layout.dp if parallel.dp_shares in MEASURED and layout.dp > 1 else 0,
            anew="remeasured" in (parallel.stage_split, parallel.dp_shares),
        )

    def recorded(self, file: Path) -> Found | None:
        """What ``file`` holds of it, None where it lacks something or is of another run."""
        if self.anew or not file.exists():
            return None
        try:
            record = dict(json.loads(file.read_text(encoding="ascii")))
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"settle: {file} must be what an earlier start of this run wrote, got {error}; "
                "remove it to measure again"
            ) from error
        if any(record.get(key) != value for key, value in self.key.items()):
            return None
        lists = (record.get("stage_split"), record.get("dp_shares"))
        for numbers, size in zip(lists, (self.num_stages, self.num_replicas), strict=True):
            if size and (numbers is None or len(numbers) != size):
                return None
        split, shares = (tuple(numbers or ()) for numbers in lists)
        return Found(split if self.num_stages else None, shares if self.num_replicas else None)


def _from_rank_0(found: Found | None, wanted: _Wanted, mesh: Mesh) -> Found | None:
    """Rank 0's record on every rank: the others may not see its disk."""
    message = torch.zeros(1 + wanted.num_stages + wanted.num_replicas, dtype=torch.int64)
    if found is not None:
        message = torch.tensor([1, *(found.stage_split or ()), *(found.dp_shares or ())])
    message = message.to(mesh.device)
    dist.all_reduce(message, group=mesh.world)  # the others' are zeros
    is_there, *numbers = message.tolist()
    if not is_there:
        return None
    split, shares = numbers[: wanted.num_stages], numbers[wanted.num_stages :]
    return Found(tuple(split) or None, tuple(shares) or None)


def _all_times(own: LayerCosts, mesh: Mesh) -> list[LayerCosts]:
    """The times of every rank, by rank; the same on all of them."""
    layout = mesh.layout
    times = torch.zeros(layout.world_size, 3, dtype=torch.float64)
    times[layout.rank_of(mesh.coordinate)] = torch.tensor(
        [own.embedding, own.block, own.head], dtype=torch.float64
    )
    times = times.to(mesh.device)
    dist.all_reduce(times, group=mesh.world)
    return [LayerCosts(embedding=e, block=b, head=h) for e, b, h in times.tolist()]


def _plain(found: Found) -> dict[str, Any]:
    return {"stage_split": found.stage_split, "dp_shares": found.dp_shares}


def _seconds(times: Sequence[LayerCosts]) -> list[dict[str, float]]:
    return [{"embedding": t.embedding, "block": t.block, "head": t.head} for t in times]


def _line(found: Found) -> str:
    parts = []
    if found.stage_split is not None:
        parts.append(f"blocks of each stage {listed(found.stage_split)}")
    if found.dp_shares is not None:
        parts.append(f"micro-batches of each replica {listed(found.dp_shares)}")
    return f"measured: {', '.join(parts)}\n"


def _write(file: Path, record: dict[str, Any]) -> None:
    """Replace the file as a whole, so that a reader never meets half of it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(record, indent=1) + "\n", encoding="ascii")
    temporary.replace(file)
