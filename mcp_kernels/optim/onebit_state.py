"""OneBitAdam's state on disk: one dict a rank, and the way from W ranks to any other number.

What the errors hold will be applied later, so it must not be lost: with the momentum that was
applied, the mean over ranks of the worker errors and the server errors add up to all that came in.
``reshard`` keeps that sum: every new rank gets the mean of the old worker errors, and the server
errors are cut anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from mcp_kernels.ops.block_layout import BlockLayout
from mcp_kernels.optim._bucket_errors import fitted

if TYPE_CHECKING:
    from mcp_kernels.optim._adam_bucket import AdamBucket
    from mcp_kernels.optim.onebit_adam import OneBitAdam

VERSION = 1
# Tensors of a bucket by what a rank holds of them: all of the buffer, its span, its chunk.
_WHOLE = ("preconditioner", "bits", "scales", "worker_error")
_SPAN = ("exp_avg_sq", "master")
_TENSORS = ("exp_avg", *_SPAN, *_WHOLE, "server_error")


def write_state(optimizer: OneBitAdam) -> dict[str, Any]:
    """See ``OneBitAdam.state_dict``."""
    group, rule = optimizer.group, optimizer._rule
    return {
        "version": VERSION,
        "world_size": 1 if group is None else group.size(),
        "rank": 0 if group is None else group.rank(),
        "block_size": optimizer.block_size,
        "count": optimizer.count,
        "num_skipped": optimizer.num_skipped,
        "num_masked": optimizer.num_masked,
        "switch_step": optimizer.switch_step,
        "lr_at_switch": list(optimizer.lr_at_switch),
        "watch": {"norms": list(rule.norms), "rates": list(rule.rates), "vote": rule.vote},
        "param_groups": [
            {key: value for key, value in options.items() if key != "params"}
            for options in optimizer.param_groups
        ],
        "buckets": [_write_bucket(bucket) for bucket in optimizer.buckets],
    }


def _write_bucket(bucket: AdamBucket) -> dict[str, Any]:
    tensors = {name: getattr(bucket, name) for name in _TENSORS}
    return {
        "names": list(bucket.flat.names),
        "sizes": list(bucket.layout.sizes),
        "is_sharded": bucket.flat.is_sharded,
        "steps": torch.stack([steps.cpu() for steps in bucket.steps]),
        "tensors": {name: t.detach().clone() for name, t in tensors.items() if t is not None},
    }


def read_state(optimizer: OneBitAdam, state: Mapping[str, Any]) -> None:
    """See ``OneBitAdam.load_state_dict``."""
    own = write_state_header(optimizer)
    for key, mine in own.items():
        if state.get(key) != mine:
            raise ValueError(
                f"OneBitAdam.load_state_dict: {key} must be {mine}, got {state.get(key)}; each "
                "rank loads its own state, and reshard (mcp_kernels.optim.onebit_state) makes one "
                "for another number of ranks"
            )
    for key, mine in {"buckets": optimizer.buckets, "param_groups": optimizer.param_groups}.items():
        if len(state[key]) != len(mine):
            raise ValueError(
                f"OneBitAdam.load_state_dict: {key} must be {len(mine)}, got {len(state[key])}; "
                "build the optimizer over the same parameters in the same order and groups"
            )
    for bucket, saved in zip(optimizer.buckets, state["buckets"], strict=True):
        _check_bucket(bucket, saved)
    for bucket, saved in zip(optimizer.buckets, state["buckets"], strict=True):
        _read_bucket(bucket, saved)
    for options, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
        options.update({key: value for key, value in saved.items() if key != "param_names"})
    optimizer.count = state["count"]
    optimizer.num_skipped = state["num_skipped"]
    optimizer.num_masked = state["num_masked"]
    optimizer.switch_step = state["switch_step"]
    optimizer.lr_at_switch = list(state["lr_at_switch"])
    rule, watch = optimizer._rule, state["watch"]
    rule.norms, rule.rates, rule.vote = list(watch["norms"]), list(watch["rates"]), watch["vote"]


def write_state_header(optimizer: OneBitAdam) -> dict[str, Any]:
    """What a state must agree with before anything of it is loaded."""
    group = optimizer.group
    return {
        "version": VERSION,
        "world_size": 1 if group is None else group.size(),
        "rank": 0 if group is None else group.rank(),
        "block_size": optimizer.block_size,
    }


def _check_bucket(bucket: AdamBucket, saved: Mapping[str, Any]) -> None:
    mine = {
        "names": list(bucket.flat.names),
        "sizes": list(bucket.layout.sizes),
        "is_sharded": bucket.flat.is_sharded,
    }
    for key, value in mine.items():
        if list(saved[key]) != value if isinstance(value, list) else saved[key] != value:
            raise ValueError(
                f"OneBitAdam.load_state_dict: {key} must be {value}, got {saved[key]}; "
                "build the optimizer over the same parameters in the same order and groups"
            )


def _read_bucket(bucket: AdamBucket, saved: Mapping[str, Any]) -> None:
    tensors: Mapping[str, Tensor] = saved["tensors"]
    for steps, value in zip(bucket.steps, saved["steps"], strict=True):
        steps.copy_(value)
    if "worker_error" in tensors:
        bucket.make_codes(bucket.new_buffer(bucket.layout.padded_numel))
    for name in _TENSORS:
        if name not in tensors:
            setattr(bucket, name, None)
            continue
        held = getattr(bucket, name)
        if held is None or held.numel() != tensors[name].numel():
            held = bucket.new_buffer(tensors[name].numel(), tensors[name].dtype)
            setattr(bucket, name, held)
        held.copy_(tensors[name])
    bucket.moves = None
    if bucket.preconditioner is not None:
        bucket.precondition_by(bucket.preconditioner)


def reshard(
    states: Sequence[Mapping[str, Any]],
    world_size: int,
    rank: int,
    *,
    error_feedback: Literal["keep", "drop"] = "keep",
) -> dict[str, Any]:
    """The state of one rank of ``world_size`` from the states of all ranks of another run.

    Args:
        states: of every old rank, in rank order.
        world_size: ranks of the new run.
        rank: the one that the result is for.
        error_feedback: "keep" moves the errors as the module says; "drop" starts them at zero.

    Returns:
        What ``load_state_dict`` takes there.

    Raises:
        ValueError: ``states`` are not the ranks of one run, or an argument is out of range.

    Cost: as much memory as the whole state; 1 rounding of the errors.
    """
    _check_set(states, world_size, rank, error_feedback)
    first = states[0]
    buckets = []
    for index, bucket in enumerate(first["buckets"]):
        olds = [state["buckets"][index] for state in states]
        layout = BlockLayout(bucket["sizes"], first["block_size"], world_size)
        buckets.append(_reshard_bucket(olds, layout, rank, keep=error_feedback == "keep"))
    return {**first, "world_size": world_size, "rank": rank, "buckets": buckets}


def _check_set(
    states: Sequence[Mapping[str, Any]], world_size: int, rank: int, error_feedback: str
) -> None:
    ranks = [state["rank"] for state in states]
    if not states or ranks != list(range(states[0]["world_size"])):
        raise ValueError(f"reshard: states must be of all ranks in order, got ranks {ranks}")
    counts = sorted({state["count"] for state in states})
    if len(counts) > 1:
        raise ValueError(f"reshard: states must be of one step, got steps {counts}")
    if not 0 <= rank < world_size:
        raise ValueError(f"reshard: rank must be in [0, {world_size - 1}], got {rank}")
    if error_feedback not in ("keep", "drop"):
        raise ValueError(f"reshard: error_feedback must be keep or drop, got {error_feedback!r}")


def _reshard_bucket(
    olds: Sequence[Mapping[str, Any]], layout: BlockLayout, rank: int, *, keep: bool
) -> dict[str, Any]:
    chunk, padded = layout.chunk_numel, layout.padded_numel
    own = slice(rank * chunk, (rank + 1) * chunk)
    # A single rank has no chunks to shard; the state of several says so itself.
    was_sharded = olds[0]["is_sharded"]
    is_sharded = was_sharded and layout.world_size > 1
    held = olds[0]["tensors"]
    tensors: dict[str, Tensor] = {}
    for name in ("exp_avg", *_SPAN):
        if name in held:
            # The momentum in float32 is whole on every rank once the variance is frozen.
            cut = was_sharded and not (name == "exp_avg" and "preconditioner" in held)
            parts = [old["tensors"][name] for old in olds] if cut else [held[name]]
            whole = fitted(torch.cat(parts), padded)
            is_cut = is_sharded and not (name == "exp_avg" and "preconditioner" in held)
            tensors[name] = whole[own].clone() if is_cut else whole
    if "worker_error" in held:
        # Padding is not masked, which would cost every update the reading of a mask.
        tensors["preconditioner"] = fitted(held["preconditioner"], padded, 1.0)
        tensors["bits"] = fitted(held["bits"], padded // 8)
        tensors["scales"] = fitted(held["scales"], layout.num_blocks)
        errors = torch.stack([old["tensors"]["worker_error"].double() for old in olds]).mean(0)
        server = fitted(torch.cat([old["tensors"]["server_error"] for old in olds]), padded)
        errors = fitted(errors, padded)
        if not keep:
            errors, server = torch.zeros_like(errors), torch.zeros_like(server)
        if layout.world_size == 1:  # alone there is no server
            errors, server = errors + server.double(), server[:0]
        tensors["worker_error"] = errors.float()
        tensors["server_error"] = server[own].clone() if layout.world_size > 1 else server
    return {**olds[0], "is_sharded": is_sharded, "tensors": tensors}
