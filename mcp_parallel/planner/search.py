"""All layouts of a job, judged: ranked by predicted step time, or refused with a reason. No torch.

Degrees run over the divisors of the number of ranks; for each choice of (dp, tp, pp, cp) the search
goes through schedules, stages a rank, micro-batches and ZeRO stages, and takes the first level of
checkpointing that fits, since each level is slower than the one before. One layout is kept for each
choice of degrees: the fastest. Whether a layout can run at all is what ``mcp_parallel.rules`` say.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from mcp_parallel.config import Config, ParallelConfig, Schedule, TrainConfig
from mcp_parallel.model.traits import traits_of
from mcp_parallel.planner.cost import CostModel, StepCost
from mcp_parallel.planner.layouts import Job, PlannedLayout
from mcp_parallel.planner.memory import USABLE, Memory, peak_memory
from mcp_parallel.rules import batch, context, layout
from mcp_parallel.rules.problem import Problem, divisors

SCHEDULES: tuple[Schedule, ...] = ("1f1b", "interleaved")
_MOST_STAGES = 20
"""Stages on a rank; published runs go up to 20."""
_MOST_SAMPLES = 16
"""In a micro-batch; matmuls of one sequence are large enough already."""
_MOST_IMAGES = 256
"""Likewise; an image is a few hundred positions."""

Fixed = Mapping[str, Any]
"""Field of ``PlannedLayout`` -> value that every layout must have."""


class Ranked(NamedTuple):
    """A layout that can run, with what it is predicted to take."""

    layout: PlannedLayout
    cost: StepCost
    memory: Memory


class Refused(NamedTuple):
    """Degrees no variant of which can run."""

    layout: PlannedLayout
    """The variant that came nearest."""
    reason: str
    """For counting: the same words for all layouts that it refuses."""
    detail: str
    """With this layout's numbers."""
    excess: float
    """Memory over what is usable, less 1; infinite where a rule refuses."""


@dataclass
class Found:
    """What a search found."""

    job: Job
    ranked: list[Ranked] = field(default_factory=list)
    """Fastest first, one for each choice of degrees."""
    refused: list[Refused] = field(default_factory=list)
    """Nearest to running first."""
    judged: int = 0
    """Layouts whose time or memory was computed."""

    def reasons(self) -> Counter[str]:
        """Choices of degrees by the reason they were refused for."""
        return Counter(one.reason for one in self.refused)


def search(
    job: Job, *, fixed: Fixed | None = None, schedules: Sequence[Schedule] = SCHEDULES
) -> Found:
    """Judge every layout of a job.

    Args:
        job: what runs, and on what.
        fixed: values that are given and not searched.
        schedules: pipeline schedules to choose among; those with several stages a rank are tried
            with several numbers of them.

    Cost: below a second for 1,024 ranks.
    """
    return _Search(job, dict(fixed or {}), schedules).run()


class _Search:
    def __init__(self, job: Job, fixed: dict[str, Any], schedules: Sequence[Schedule]) -> None:
        self.job, self.fixed, self.schedules = job, fixed, schedules
        self.model = CostModel(job)
        self.limit = USABLE * job.hardware.memory_bytes
        self.found = Found(job)
        is_text = traits_of(job.model).continues_text
        self.most_samples = _MOST_SAMPLES if is_text else _MOST_IMAGES
        self._config = Config(
            model=job.model, train=TrainConfig(global_batch_size=job.global_batch_size)
        )
        self._judged_rules: dict[Any, Problem | None] = {}

    def run(self) -> Found:
        for dp, tp, pp, cp in self._degrees():
            self._one(dp, tp, pp, cp)
        self.found.ranked.sort(key=lambda one: one.cost.step_s)
        self.found.refused.sort(key=lambda one: (one.excess, one.layout))
        return self.found

    def _degrees(self) -> Iterator[tuple[int, int, int, int]]:
        ranks = self.job.ranks
        for tp in self._given("tp", divisors(ranks)):
            for cp in self._given("cp", divisors(ranks // tp) if ranks % tp == 0 else []):
                rest, left = divmod(ranks, tp * cp)
                for pp in self._given("pp", divisors(rest) if not left else []):
                    dp = rest // pp
                    if dp * pp == rest and self.fixed.get("dp", dp) == dp:
                        yield dp, tp, pp, cp

    def _given(self, name: str, choices: Sequence[Any]) -> list[Any]:
        wanted = self.fixed.get(name)
        return list(choices) if wanted is None else [c for c in choices if c == wanted]

    # --- one choice of degrees ------------------------------------------------------------------

    def _one(self, dp: int, tp: int, pp: int, cp: int) -> None:
        """Keep the fastest variant of these degrees, or the one that came nearest and why not."""
        orders = self._given("rank_order", self.job.runtime.rank_orders)
        start = PlannedLayout(dp, tp, pp, cp, "1f1b", 1, 1, 0, "none", orders[0])
        refused = self._refused_degrees(start)
        best: Ranked | None = None
        if refused is None:
            for variant in self._variants(start):
                judged = self._judge(variant)
                if isinstance(judged, Ranked):
                    if best is None or judged.cost.step_s < best.cost.step_s:
                        best = judged
                elif refused is None or judged.excess < refused.excess:
                    refused = judged
        if best is not None:
            self.found.ranked.append(self._in_best_order(best))
        elif refused is not None:
            self.found.refused.append(refused)

    def _in_best_order(self, best: Ranked) -> Ranked:
        """With the order of ranks that takes least; memory does not depend on it."""
        for order in self._given("rank_order", self.job.runtime.rank_orders)[1:]:
            layout = best.layout._replace(rank_order=order)
            cost = self.model.step(layout)
            if cost.step_s < best.cost.step_s:
                best = Ranked(layout, cost, best.memory)
        return best

    def _refused_degrees(self, start: PlannedLayout) -> Refused | None:
        """What keeps every variant of these degrees from running."""
        job, domain = self.job, self.job.hardware.domain_ranks
        parallel = ParallelConfig(tp=start.tp, cp=start.cp)
        config = replace(self._config, parallel=parallel)
        found = self._rule("tp", start.tp, layout.tensor_problems, config)
        found = found or self._rule("cp", start.cp, context.context_problems, config)
        if found is not None:
            return _by_rule(start, found)
        if start.tp > domain:
            detail = f"tp = {start.tp} is more than the {domain} ranks of {job.hardware.name}"
            return Refused(start, "tp leaves the fast link's domain", detail, float("inf"))
        if start.cp > 1 and not job.runtime.has_context:
            return Refused(start, "no context parallelism", job.runtime.name, float("inf"))
        if start.dp > job.global_batch_size:
            detail = f"dp = {start.dp} for a batch of {job.global_batch_size} samples"
            return Refused(start, "more data-parallel ranks than samples", detail, float("inf"))
        return None

    def _rule(self, name: str, value: Any, rule: Any, config: Config) -> Problem | None:
        """The rule's first problem, remembered by what it looks at."""
        key = (name, value)
        if key not in self._judged_rules:
            self._judged_rules[key] = next(iter(rule(config)), None)
        return self._judged_rules[key]

    def _variants(self, start: PlannedLayout) -> Iterator[PlannedLayout | Refused]:
        """Every schedule, micro-batch and ZeRO stage; without checkpointing."""
        share = self.job.global_batch_size // start.dp
        samples = [size for size in divisors(share) if size <= self.most_samples]
        sizes = self._given("micro_batch_size", samples)
        runtime, spread = self.job.runtime, start.dp * start.cp
        stages = runtime.pipeline_zero if start.pp > 1 else runtime.zero
        levels = self._given("zero", stages if spread > 1 else stages[:1])
        for schedule, virtual in self._pipelines(start.pp):
            staged = start._replace(schedule=schedule, virtual_stages=virtual)
            if not runtime.has_uneven and self.job.model.num_layers % staged.num_stages:
                detail = f"{self.job.model.num_layers} blocks on {staged.num_stages} stages"
                yield Refused(staged, "stages of unequal numbers of blocks", detail, float("inf"))
                continue
            for size in sizes:
                sized = staged._replace(micro_batch_size=size)
                problem = self._staging_problem(sized)
                if problem is not None:
                    yield _by_rule(sized, problem)
                    continue
                for zero in levels:
                    yield sized._replace(zero=zero)

    def _pipelines(self, pp: int) -> Iterator[tuple[Schedule, int]]:
        if pp == 1:
            yield from ((s, 1) for s in self._given("schedule", ["1f1b"]))
            return
        for schedule in self._given("schedule", self.schedules):
            if schedule == "interleaved" and not self.job.runtime.has_interleaved:
                continue
            counts = self._virtual_stages(pp) if schedule == "interleaved" else [1]
            for count in self._given("virtual_stages", counts):
                yield schedule, count

    def _virtual_stages(self, pp: int) -> list[int]:
        """Stages a rank that share the blocks out evenly, or with two left for the ends."""
        layers = self.job.model.num_layers
        if not self.job.runtime.has_uneven:  # few divide, so all of them
            return [v for v in divisors(layers // pp)[1:] if layers % pp == 0]
        most = min(_MOST_STAGES, layers // pp)
        if "virtual_stages" in self.fixed:
            return list(range(2, most + 1))
        even = [v for v in range(2, most + 1) if 0 in (layers % (pp * v), (layers + 2) % (pp * v))]
        return even or [v for v in (2, 4) if v <= most]

    def _staging_problem(self, sized: PlannedLayout) -> Problem | None:
        """A pipeline without layers, or a batch that does not divide."""
        key = (sized.dp, sized.pp, sized.schedule, sized.virtual_stages, sized.micro_batch_size)
        if key in self._judged_rules:
            return self._judged_rules[key]
        config = replace(
            self._config,
            parallel=ParallelConfig(
                dp=sized.dp,
                pp=sized.pp,
                schedule=sized.schedule,
                virtual_stages=sized.virtual_stages,
            ),
            train=replace(self._config.train, micro_batch_size=sized.micro_batch_size),
        )
        rules = (layout.stage_problems, batch.batch_problems)
        found = (problem for rule in rules for problem in rule(config))
        self._judged_rules[key] = next(found, None)
        return self._judged_rules[key]

    def _judge(self, variant: PlannedLayout | Refused) -> Ranked | Refused:
        """With the first level of checkpointing that fits."""
        if isinstance(variant, Refused):
            return variant
        levels = self._given("activation_checkpointing", self.job.runtime.checkpointing)
        before: tuple[PlannedLayout, Memory] | None = None
        chosen, memory = variant, None
        for level in levels:
            chosen = variant._replace(activation_checkpointing=level)
            memory = peak_memory(self.job, chosen)
            self.found.judged += 1
            if memory.total <= self.limit:
                return self._fitting(chosen, memory, before)
            if memory.state > self.limit:  # no level fits: told with the one that comes nearest
                chosen = variant._replace(activation_checkpointing=levels[-1])
                memory = peak_memory(self.job, chosen)
                break
            before = chosen, memory
        if memory is None:
            detail = f"{self.job.runtime.name} has {', '.join(self.job.runtime.checkpointing)}"
            return Refused(variant, "no such checkpointing", detail, float("inf"))
        return _by_memory(chosen, memory, self.limit, self.job)

    def _fitting(
        self, chosen: PlannedLayout, memory: Memory, before: tuple[PlannedLayout, Memory] | None
    ) -> Ranked:
        """A layout that fits, of a trainer that may checkpoint some of the blocks only.

        ``before`` is the level before, which does not fit, and its memory.
        """
        cost, runtime = self.model.step(chosen), self.job.runtime
        is_full = chosen.activation_checkpointing == "full"
        if before is None or not is_full or not runtime.recomputes_some:
            return Ranked(chosen, cost, memory)
        lower, needed = before
        part = (needed.total - self.limit) / (needed.total - memory.total)
        mixed = Memory(*((1 - part) * a + part * b for a, b in zip(needed, memory, strict=True)))
        return Ranked(chosen, self.model.step(lower).towards(cost, part), mixed)


def _by_rule(variant: PlannedLayout, problem: Problem) -> Refused:
    detail = f"{problem.key} must {problem.rule}, got {problem.got}"
    return Refused(variant, problem.name, detail, float("inf"))


def _by_memory(variant: PlannedLayout, memory: Memory, limit: float, job: Job) -> Refused:
    gib = 2**30
    has_state = memory.state > limit
    reason = "weights and optimizer do not fit" if has_state else "activations do not fit"
    detail = (
        f"needs {memory.total / gib:.1f} GiB of {job.hardware.name}'s usable {limit / gib:.1f} "
        f"({memory.state / gib:.1f} of them weights, gradients and optimizer)"
    )
    return Refused(variant, reason, detail, memory.total / limit - 1)
