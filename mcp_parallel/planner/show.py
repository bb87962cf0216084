"""A plan as text for people. No torch."""

from __future__ import annotations

from mcp_parallel.model.traits import traits_of
from mcp_parallel.planner.layouts import PlannedLayout
from mcp_parallel.planner.plan import Plan, ranked_mapping
from mcp_parallel.planner.search import Ranked
from mcp_parallel.presets import num_parameters

_NEAREST = 3
_HEAD = (
    "  #   dp  tp  pp  cp   v  mb zero ckpt       step s  TFLOP/s    MFU  memory"
    "          bubble  order"
)


def as_text(plan: Plan, top: int) -> str:
    """The ranked table, what was refused and why, and the classic rule."""
    job = plan.job
    parameters = num_parameters(job.model) / 1e9
    what = f"{job.ranks} x {job.hardware.name}, {job.precision}"
    batch = f"{job.global_batch_size} x {job.model.seq_len} {traits_of(job.model).position} a step"
    lines = [
        f"{parameters:.1f} billion parameters on {what}, {batch}",
        "",
        _HEAD,
        *(_row(plan, place, one) for place, one in enumerate(plan.ranked[:top], 1)),
        "",
        f"{len(plan.ranked)} choices of (dp, tp, pp, cp) can run; the first spends its step on "
        + _parts(plan.ranked[0]),
        *_refused(plan),
        *_rule(plan),
    ]
    return "\n".join(lines)


def _row(plan: Plan, place: int, one: Ranked) -> str:
    layout = one.layout
    values = ranked_mapping(plan.job, one)
    memory = f"{values['memory_bytes'] / 2**30:6.1f} GiB {values['memory_share']:4.0%}"
    return (
        f"{place:3} {layout.dp:4} {layout.tp:3} {layout.pp:3} {layout.cp:3} "
        f"{layout.stages_per_rank:3} {layout.micro_batch_size:3} {layout.zero:4} "
        f"{layout.activation_checkpointing:9} {values['step_time_s']:7.3g} "
        f"{values['tflops_per_gpu']:8.3g} {values['mfu']:6.1%} {memory} {values['bubble']:6.1%}"
        f"  {layout.rank_order}"
    )


def _parts(one: Ranked) -> str:
    step = one.cost.step_s
    parts = sorted(one.cost.parts().items(), key=lambda part: -part[1])
    return ", ".join(f"{name} {value / step:.1%}" for name, value in parts if value >= 5e-4 * step)


def _refused(plan: Plan) -> list[str]:
    """Counts by reason, and those that came nearest."""
    if not plan.refused:
        return []
    counts = ", ".join(f"{count} by {reason}" for reason, count in plan.reasons.items())
    lines = ["", f"refused: {counts}"]
    nearest = [one for one in plan.refused if one.excess < float("inf")][:_NEAREST]
    lines += [f"  {_degrees(one.layout)}: {one.detail}" for one in nearest]
    return lines


def _rule(plan: Plan) -> list[str]:
    rule = plan.rule
    lines = ["", f"classic rule (MP = ceil(sqrt(B)), PP <= layers / 5): {_degrees(rule.layout)}"]
    if rule.times_slower is not None:
        lines.append(f"  runs, in {rule.times_slower:.2f} times the first one's step")
    return lines + [f"  {problem}" for problem in rule.problems]


def _degrees(layout: PlannedLayout) -> str:
    return f"dp {layout.dp} tp {layout.tp} pp {layout.pp} cp {layout.cp}"
