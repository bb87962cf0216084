"""1-bit Adam's state as named rectangles, so that any layout can load it.

By parameter, as whole tensors of its shape: the momentum (decoded), the second moment or the
preconditioner, the server's error; and, with a leading dim of dp * cp, every rank's worker error.
At the same layout a resumed run continues bit by bit. At another one ``onebit_move`` says what
becomes of it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mcp_kernels.ops import _comm
from mcp_kernels.ops.onebit_compress import onebit_decompress
from mcp_kernels.optim import OneBitAdam
from mcp_kernels.optim._adam_bucket import AdamBucket
from mcp_parallel.checkpoint.manifest import Manifest
from mcp_parallel.checkpoint.planning import LocalChunk
from mcp_parallel.optim.onebit_move import (
    Flats,
    freeze_others,
    load_frozen,
    load_moments,
    new_preconditioner,
    thaw,
)
from mcp_parallel.optim.scaler import updates_in
from mcp_parallel.parallel.mesh import Mesh
from mcp_parallel.parallel.shards import Shard
from mcp_parallel.schedules.action import V_SHAPED


class OneBitCheckpoint:
    """Writes and reads the state of ``adam``.

    Args:
        adam: over ``shards``, parameters named as they are.
        shards: this rank's.
        mesh: this rank's.
        zero: stage of ZeRO of the state.
    """

    def __init__(self, adam: OneBitAdam, shards: Sequence[Shard], mesh: Mesh, zero: int) -> None:
        self.adam, self.mesh = adam, mesh
        layout = mesh.layout
        # Which rank holds what: a V holds other stages than a round of as many.
        places = [layout.stages_per_rank] + ["v"] * (layout.schedule in V_SHAPED and layout.pp > 1)
        places += ["cp", layout.cp] if layout.cp > 1 else []
        self._layout = [layout.dp_cp, layout.tp, layout.pp, *places, zero]
        self._shards = {shard.name: shard for shard in shards}
        self._loading: list[Flats] = []

    # --- saving ---------------------------------------------------------------------------------

    def chunks(self) -> list[LocalChunk]:
        """All state by parameter; collective over dp."""
        found = []
        for bucket in self.adam.buckets:
            flats = _whole_flats(bucket)
            for kind, flat in flats.items():
                found += self._chunks_of(bucket, kind, flat, bucket.flat.names)
            if bucket.worker_error is not None:
                dp = self.mesh.layout.dp_cp
                found += self._worker_chunks(bucket, bucket.worker_error, dp, bucket.flat.names)
        return found

    def extra(self) -> dict[str, Any]:
        """Numbers that all ranks agree on; collective over the mesh."""
        adam = self.adam
        return {
            "switch_step": adam.switch_step,
            "has_codes": any(b.is_frozen and b.exp_avg is None for b in adam.buckets),
            # One for all groups, whose number differs between ranks.
            "lr_at_switch": max(adam.lr_at_switch, default=0.0),
            "layout": self._layout,
            "watch": self._watch(),
        }

    def _watch(self) -> list[list[float]]:
        """What the automatic switch has seen on every rank, by its place in the mesh."""
        rule = self.adam._rule
        mine = [float(rule.vote), float(len(rule.norms)), *rule.norms, *rule.rates]
        if self.mesh.world is None:
            return [mine]
        length = torch.tensor([len(mine)], device=self.mesh.device)
        longest = int(_comm.gather(length, self.mesh.world, 0).max())
        padded = torch.zeros(1, longest, dtype=torch.float64, device=self.mesh.device)
        padded[0, : len(mine)] = torch.tensor(mine, dtype=torch.float64)
        layout, by_rank = self.mesh.layout, _comm.gather(padded, self.mesh.world, 0).tolist()
        return [by_rank[layout.rank_of(place)] for place in layout.places()]

    def _chunks_of(
        self, bucket: AdamBucket, kind: str, flat: Tensor, names: Collection[str]
    ) -> list[LocalChunk]:
        views = zip(bucket.flat.names, bucket.flat.views(flat), strict=True)
        return [
            LocalChunk(
                f"optim.{kind}.{name}",
                view,
                self._shards[name].global_shape,
                self._shards[name].offsets,
            )
            for name, view in views
            if name in names
        ]

    def _worker_chunks(
        self, bucket: AdamBucket, flat: Tensor, dp: int, names: Collection[str]
    ) -> list[LocalChunk]:
        """This rank's row where there is one and dp is as it was; else all rows."""
        rows = flat.view(-1, bucket.layout.padded_numel)
        layout, place = self.mesh.layout, self.mesh.coordinate
        first = layout.data_index(place) if rows.shape[0] == 1 and dp == layout.dp_cp else 0
        found = []
        for index, name in enumerate(bucket.flat.names):
            if name not in names:
                continue
            at, param = bucket.layout.offsets[index], bucket.flat.params[index]
            part = rows[:, at : at + param.numel()].view(rows.shape[0], *param.shape)
            shard = self._shards[name]
            found.append(
                LocalChunk(
                    f"optim.worker_error.{name}",
                    part,
                    (dp, *shard.global_shape),
                    (first, *shard.offsets),
                )
            )
        return found

    # --- loading --------------------------------------------------------------------------------

    def chunks_to_load(self, manifest: Manifest) -> list[LocalChunk]:
        """Destinations for a checkpoint of this optimizer or of plain AdamW."""
        saved = _saved(manifest.extra)
        self._loading, found = [], []
        for bucket in self.adam.buckets:
            frozen = _frozen_names(bucket, manifest)
            moving = set(bucket.flat.names) - frozen
            kinds = {"exp_avg": frozen | moving}
            if frozen:
                kinds |= {"preconditioner": frozen, "server_error": frozen}
            if moving:
                kinds |= {"exp_avg_sq": moving}
            padded = bucket.layout.padded_numel
            flats = {
                kind: new_preconditioner(bucket)
                if kind == "preconditioner"
                else bucket.new_buffer(padded, bucket.flat.state_dtype)
                for kind in kinds
            }
            for kind, names in kinds.items():
                found += self._chunks_of(bucket, kind, flats[kind], names)
            if frozen:
                old_dp = saved["layout"][0]
                # At another dp, and where errors join a momentum that all ranks share, every rank
                # goes on with the mean of all ranks' errors.
                is_own = bucket.compresses and old_dp == self.mesh.layout.dp_cp
                rows = 1 if is_own else old_dp
                flats["worker_error"] = bucket.new_buffer(rows * padded)
                found += self._worker_chunks(bucket, flats["worker_error"], old_dp, frozen)
            self._loading.append(flats)
        return found

    def loaded(self, manifest: Manifest) -> None:
        """Take over what the destinations hold."""
        saved, adam, count = _saved(manifest.extra), self.adam, updates_in(manifest)
        adam.count, adam.switch_step = count, saved["switch_step"]
        adam.lr_at_switch = [saved.get("lr_at_switch", 0.0)] * len(adam.param_groups)
        for bucket, flats in zip(adam.buckets, self._loading, strict=True):
            for steps in bucket.steps:
                steps.fill_(count)
            bucket.refresh_master()
            frozen = _frozen_names(bucket, manifest)
            if adam.is_compressing and bucket.compresses:
                freeze_others(bucket, flats, frozen, adam.mask)
                load_frozen(bucket, flats, has_codes=saved["has_codes"])
            else:
                thaw(bucket, flats, frozen)
                load_moments(bucket, flats)
        self._loading = []
        self._remember_watch(saved)

    def _remember_watch(self, saved: Mapping[str, Any]) -> None:
        if saved.get("layout") != self._layout:
            return  # at another layout the rule looks anew
        mine = saved["watch"][self.mesh.layout.place_index(self.mesh.coordinate)]
        rule, (vote, num_norms, *values) = self.adam._rule, mine
        norms = int(num_norms)
        rates = len(self.adam.param_groups) if norms else 0
        rule.vote, rule.norms = bool(vote), list(values[:norms])
        rule.rates = list(values[norms : norms + rates])


def _frozen_names(bucket: AdamBucket, manifest: Manifest) -> set[str]:
    """Parameters whose second moment a checkpoint holds as a preconditioner."""
    names = bucket.flat.names
    return {name for name in names if f"optim.preconditioner.{name}" in manifest.tensors}


def _saved(extra: Mapping[str, Any]) -> Mapping[str, Any]:
    """This optimizer's part of a manifest; what plain AdamW wrote is stage 1."""
    return extra.get("onebit") or {"switch_step": None}


def _whole_flats(bucket: AdamBucket) -> Flats:
    """State of the whole bucket but for the workers' errors; collective over dp if sharded."""
    padded, block = bucket.layout.padded_numel, bucket.layout.block_size
    flats: Flats = {}
    if bucket.bits is not None and bucket.exp_avg is None:
        assert bucket.scales is not None
        flats["exp_avg"] = onebit_decompress(bucket.bits, bucket.scales, padded, block)
    for kind in ("exp_avg", "exp_avg_sq", "preconditioner"):
        value = getattr(bucket, kind)
        if value is not None:
            flats[kind] = _gathered(bucket, value)
    if bucket.server_error is not None:
        server = bucket.server_error
        flats["server_error"] = (
            torch.zeros(padded, device=server.device)
            if bucket.group is None
            else _gathered(bucket, server)
        )
    return flats


def _gathered(bucket: AdamBucket, value: Tensor) -> Tensor:
    if value.numel() == bucket.layout.padded_numel:
        return value
    assert bucket.group is not None
    return _comm.gather(value, bucket.group, 0)
