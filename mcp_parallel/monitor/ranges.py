"""Healthy ranges, where they come from, and what a figure outside of one says. No torch.

Each function looks at one kind of figure and gives a finding or nothing. What the ranges are, and
why, is in docs/monitors.md as well.
"""

from __future__ import annotations

from collections.abc import Mapping

from mcp_parallel.monitor.verdicts import Finding

# Deviations above the median of the last steps. Losses of single batches lie within 3 or 4.
SPIKE_Z = 6.0
# The median norm of the last few steps over that of a whole window. Norms of single small batches
# reach 15 times the usual, which clipping takes care of; a median that rises is a change.
GRADIENT_JUMP = 10.0
# A layer's gradient, by the size of an element, over the median layer's: blocks of a healthy
# pre-norm model lie within two orders of magnitude of each other.
VANISHED = 1e-4
# Share of steps clipped, and the median norm over the limit. Most recipes clip at 1 and live with
# norms of 0.1 to 2; ten times the limit means that the step's size is the limit's alone.
CLIPPED_SHARE, CLIPPED_NORM = 0.95, 10.0
# ||dW|| / ||W||. About 1e-3 is the old rule of thumb (Karpathy, CS231n); Adam gives lr over the rms
# of the weights, so small models at high rates start at a few percent. Late in training, at
# learning rates around 1e-4, 1e-6 to 1e-4 is usual. Above these a step undoes what is there.
UPDATE_EARLY, UPDATE_LATE = 0.1, 0.05
EARLY = 0.5
"""Part of the run that is early."""
# Below this part of the learning rate: Adam moves an element by about lr, weights are below 1 in
# size, so a layer that gets gradients changes by about lr at the least.
STANDS_STILL = 0.01
# A block's output variance over the one before. Blocks of a pre-norm model add to the residual
# stream, so its variance grows about linearly with depth; one block does not multiply it.
VARIANCE_JUMP = 30.0
VARIANCE_GROWTH_PER_BLOCK = 20.0
# Share of a block's units. Healthy SwiGLU and GELU models have next to none; ReLU ones lose a few.
DEAD_SHARE = 0.01
# Of the last steps, after the scale has found its level.
SKIPPED_SHARE = 0.2

Figures = Mapping[str, float]


def loss_spike(loss: float, z: float | None, median: float | None) -> Finding | None:
    """A loss far above those of the last steps."""
    if z is None or median is None or z <= SPIKE_Z:
        return None
    return Finding(
        kind="loss_spike",
        what=f"loss {loss:.4g} where the last steps had {median:.4g} ({z:.0f} deviations)",
        cause="a bad batch or a learning rate at its limit",
        advice="look at this step's data; if it comes back, lower train.lr or train.clip_norm",
        value=z,
        high=SPIKE_Z,
    )


def gradient_explodes(norm: float | None, median: float | None) -> Finding | None:
    """The norm of the last few steps, by their median, far above that of the window before."""
    if norm is None or median is None or norm <= GRADIENT_JUMP * median:
        return None
    return Finding(
        kind="gradient_explodes",
        what=f"a median of {norm:.3g} over the last steps, {median:.3g} before them",
        cause="a learning rate that is too high, or a bad batch",
        advice="lower train.lr, lengthen train.warmup_steps, or look at this step's data",
        value=norm,
        high=GRADIENT_JUMP * median,
    )


def always_clipped(share: float, median: float | None, limit: float) -> Finding | None:
    """Nearly every step of a full window was clipped, and by a lot."""
    if median is None or share < CLIPPED_SHARE or limit <= 0 or median <= CLIPPED_NORM * limit:
        return None
    return Finding(
        kind="always_clipped",
        what=f"{share:.0%} of the last steps clipped, norm {median:.3g} against {limit:g}",
        cause="a clip norm that does not fit the model, or initial weights that are too large",
        advice=f"set train.clip_norm near {2 * median:.1g}, or lower train.lr",
        value=median,
        high=CLIPPED_NORM * limit,
    )


def loss_scale_falls(share: float) -> Finding | None:
    """Too many steps overflow."""
    if share <= SKIPPED_SHARE:
        return None
    return Finding(
        kind="loss_scale_falls",
        what=f"{share:.0%} of the last steps overflowed and were skipped",
        cause="gradients or activations beyond fp16's range",
        advice="use --set train.precision=bf16, or lower train.lr",
        value=share,
        high=SKIPPED_SHARE,
    )


def gradient_vanishes(per_million: Figures) -> Finding | None:
    """A layer's gradient next to the median layer's."""
    ordered = sorted(per_million.values())
    middle = ordered[len(ordered) // 2]
    worst = min(per_million, key=lambda layer: per_million[layer])
    if middle <= 0 or per_million[worst] >= VANISHED * middle:
        return None
    return Finding(
        kind="gradient_vanishes",
        what=f"{worst} has {per_million[worst] / middle:.1e} of the median layer's gradient",
        cause="a layer that is cut off: units that no longer react, or an output that nobody uses",
        advice="look at dead_share and activation_variance of that layer, and at its weights",
        where=worst,
        value=per_million[worst],
        low=VANISHED * middle,
    )


def update_too_large(ratios: Figures, progress: float) -> Finding | None:
    """Layers that a step changes by a large part; ``progress`` is the part of the run done."""
    high = UPDATE_EARLY if progress <= EARLY else UPDATE_LATE
    over = [layer for layer, ratio in ratios.items() if ratio > high]
    if not over:
        return None
    worst = max(over, key=lambda layer: ratios[layer])
    return Finding(
        kind="update_too_large",
        what=f"one step changes {worst} by {ratios[worst]:.1%}{_others(over)}, healthy is below "
        f"{high:.0%}",
        cause="a learning rate that is too high",
        advice=f"lower train.lr by {_round_up(ratios[worst] / high)} or lengthen "
        "train.warmup_steps",
        where=worst,
        value=ratios[worst],
        high=high,
    )


def update_too_small(ratios: Figures, lr: float) -> Finding | None:
    """Layers that a step leaves as they are."""
    low = STANDS_STILL * lr
    under = [layer for layer, ratio in ratios.items() if ratio < low]
    if not under:
        return None
    worst = min(under, key=lambda layer: ratios[layer])
    return Finding(
        kind="update_too_small",
        what=f"one step changes {worst} by {ratios[worst]:.1e}{_others(under)} at a learning rate "
        f"of {lr:.1e}",
        cause="gradients that do not reach it, or weights that have grown out of proportion",
        advice="look at grad_norm and weight_norm of that layer; raise train.weight_decay if its "
        "weights grow",
        where=worst,
        value=ratios[worst],
        low=low,
    )


def variance_by_depth(variances: Figures) -> Finding | None:
    """A block that multiplies or wipes out what it is given, or growth from first to last."""
    names, values = list(variances), list(variances.values())
    for before, after, name in zip(values, values[1:], names[1:], strict=False):
        if after > VARIANCE_JUMP * before > 0:
            return _grows(name, f"{name} makes it {after / before:.0f} times larger", after, before)
        if after < before / VARIANCE_JUMP:
            return Finding(
                kind="variance_collapses",
                what=f"{name} leaves {after / before:.1e} of the variance it is given",
                cause="a block whose output cancels its input, or weights that went to zero",
                advice="look at weight_norm of that block; lower train.lr or train.weight_decay",
                where=name,
                value=after,
                low=before / VARIANCE_JUMP,
            )
    limit = VARIANCE_GROWTH_PER_BLOCK * len(values)
    if len(values) > 1 and values[-1] > limit * values[0] > 0:
        growth = f"{values[-1] / values[0]:.0f} times from {names[0]} to {names[-1]}"
        return _grows(names[-1], growth, values[-1], limit * values[0] / VARIANCE_JUMP)
    return None


def _grows(where: str, what: str, value: float, before: float) -> Finding:
    return Finding(
        kind="variance_grows",
        what=what,
        cause="residual projections that start or have become too large",
        advice="lower model.residual_init_scale or train.lr, or raise train.weight_decay",
        where=where,
        value=value,
        high=VARIANCE_JUMP * before,
    )


def dead_units(shares: Figures) -> Finding | None:
    """Blocks with units that no token of the batch woke."""
    over = [layer for layer, share in shares.items() if share > DEAD_SHARE]
    if not over:
        return None
    worst = max(over, key=lambda layer: shares[layer])
    return Finding(
        kind="dead_units",
        what=f"{shares[worst]:.1%} of the units of {worst}{_others(over)} react to no token of the "
        "batch",
        cause="updates that were too large, or weights that were loaded as zeros",
        advice="lower train.lr or lengthen train.warmup_steps; dead units do not come back by "
        "themselves",
        where=worst,
        value=shares[worst],
        high=DEAD_SHARE,
    )


def _others(layers: list[str]) -> str:
    more = len(layers) - 1
    return f" and {more} more layer{'s' if more > 1 else ''}" if more else ""


def _round_up(factor: float) -> str:
    """``about 3 times``: a factor that nobody takes for exact."""
    return f"about {factor:.0f} times" if factor >= 2 else "a half"
