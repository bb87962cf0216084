"""``mcp_parallel.plan``: layouts for a model on given hardware, best first. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from mcp_parallel.config import Config, ModelConfig
from mcp_parallel.errors import ConfigError, shown
from mcp_parallel.model.traits import traits_of
from mcp_parallel.planner.explain import impossible
from mcp_parallel.planner.hardware import Hardware, hardware
from mcp_parallel.planner.layouts import Job
from mcp_parallel.planner.rule_of_thumb import RuleOfThumb, rule_of_thumb
from mcp_parallel.planner.search import Fixed, Found, Ranked, Refused, search
from mcp_parallel.rules.family import family_problems

DEFAULT_TOKENS = 4 * 2**20
"""Of a step where no batch is given, as models of 7 to 70 billion parameters are trained."""
DEFAULT_IMAGES = 4096
"""Likewise of a vision transformer (Dosovitskiy et al. 2021, table 3)."""
_MAX_RANKS = 1 << 20


@dataclass(frozen=True)
class Plan:
    """What the planner found for a job."""

    job: Job
    ranked: list[Ranked]
    """Layouts that can run, fastest first, one for each choice of degrees."""
    refused: list[Refused]
    """Choices of degrees that cannot, nearest to running first."""
    reasons: dict[str, int]
    """How many choices of degrees each reason refused."""
    rule: RuleOfThumb

    def to_mapping(self, top: int | None = None) -> dict[str, Any]:
        """Plain values, as ``plan --json`` prints them.

        Args:
            top: layouts, and refused ones, at most; None gives all.
        """
        job = self.job
        return {
            "job": {
                "ranks": job.ranks,
                "hardware": job.hardware.name,
                "memory_bytes": job.hardware.memory_bytes,
                "precision": job.precision,
                "global_batch_size": job.global_batch_size,
                "seq_len": job.model.seq_len,
            },
            "layouts": [ranked_mapping(job, one) for one in self.ranked[:top]],
            "refused": [
                {"layout": one.layout.to_mapping(), "reason": one.reason, "detail": one.detail}
                for one in self.refused[:top]
            ],
            "reasons": self.reasons,
            "rule_of_thumb": self.rule.to_mapping(),
        }


def ranked_mapping(job: Job, one: Ranked) -> dict[str, Any]:
    """One layout as plain values; seconds of its parts sum up to the step."""
    tflops = one.cost.tflops(job)
    return {
        **one.layout.to_mapping(),
        "step_time_s": one.cost.step_s,
        "tokens_per_s_per_gpu": one.cost.tokens_per_s(job.ranks),
        "tflops_per_gpu": tflops,
        "mfu": tflops * 1e12 / job.hardware.peak(job.precision),
        "memory_bytes": round(one.memory.total),
        "memory_share": one.memory.total / job.hardware.memory_bytes,
        "bubble": one.cost.bubble,
        "parts_s": one.cost.parts(),
    }


def plan(
    model: str | ModelConfig,
    *,
    gpus: int,
    gpu: str | Hardware = "h100",
    gpus_per_node: int | None = None,
    inter_node_gbit: float | None = None,
    batch: int | None = None,
    seq: int | None = None,
    precision: str = "bf16",
    fixed: Fixed | None = None,
) -> Plan:
    """Rank the layouts of a model on a number of GPUs by predicted step time.

    Args:
        model: a preset's name, or a shape of either family.
        gpus: ranks there are.
        gpu: a name of ``planner.hardware.HARDWARE``, or figures of your own.
        gpus_per_node: ranks that the fast link joins; None as the hardware has it.
        inter_node_gbit: of each GPU's share of the network, one way, in Gb/s; None likewise.
        batch: samples of a step over all ranks; None takes about four million tokens, or 4096
            images.
        seq: tokens of a sample; None is the model's context.
        precision: of the matmuls: bf16, fp16, fp32, or fp8 (which only the planner knows).
        fixed: fields of a layout that are given, such as ``{"tp": 4, "zero": 1}``.

    Returns:
        Layouts with step time, TFLOP/s of model work (causal attention counted once), memory and
        bubble; those refused and why; and the classic rule beside them.

    Raises:
        ConfigError: an argument is out of range, or nothing fits: by how much, and what would.

    Cost: below a second for 1,024 ranks.
    """
    shape = _shape(model, seq)
    card = _card(gpu, gpus_per_node, inter_node_gbit)
    card.peak(precision)
    ranks = _whole("gpus", gpus, _MAX_RANKS)
    size = default_batch(ranks, shape) if batch is None else _whole("batch", batch, 1 << 24)
    job = Job(model=shape, ranks=ranks, hardware=card, global_batch_size=size, precision=precision)
    return plan_job(job, fixed)


def plan_job(job: Job, fixed: Fixed | None = None) -> Plan:
    """As ``plan``, of a job that is put together already."""
    found: Found = search(job, fixed=fixed)
    if not found.ranked:
        raise ConfigError(impossible(found, fixed))
    rule = rule_of_thumb(job, found, cp=int((fixed or {}).get("cp", 1)))
    return Plan(job, found.ranked, found.refused, dict(found.reasons().most_common()), rule)


def default_batch(ranks: int, model: ModelConfig) -> int:
    """A batch of about ``DEFAULT_TOKENS``, or ``DEFAULT_IMAGES``, that all ranks can share out."""
    is_text = traits_of(model).continues_text
    samples = DEFAULT_TOKENS / model.seq_len if is_text else DEFAULT_IMAGES
    return max(1, round(samples / ranks)) * ranks


def _shape(model: str | ModelConfig, seq: int | None) -> ModelConfig:
    if isinstance(model, str):
        model = Config.from_mapping({"model": {"preset": model}}).model
    if seq is not None:
        model = replace(model, seq_len=_whole("seq", seq, 1 << 24))
    problems = list(family_problems(Config(model=model)))
    if problems:
        raise ConfigError([str(problem) for problem in problems])
    return model


def _card(
    gpu: str | Hardware, gpus_per_node: int | None, inter_node_gbit: float | None
) -> Hardware:
    card = hardware(gpu) if isinstance(gpu, str) else gpu
    if gpus_per_node is not None:
        card = replace(card, domain_ranks=_whole("gpus_per_node", gpus_per_node, _MAX_RANKS))
    if inter_node_gbit is not None:
        if not 0 < inter_node_gbit < 1e6:
            problem = (
                "plan: inter_node_gbit must be above 0 and below 1e6, got "
                f"{shown(inter_node_gbit)}; write for example 400"
            )
            raise ConfigError([problem])
        card = replace(card, network_bytes_per_s=inter_node_gbit / 8 * 1e9)
    return card


def _whole(name: str, value: int, most: int) -> int:
    if not 1 <= value <= most:
        problem = f"plan: {name} must be at least 1 and at most {most}, got {shown(value)}; use 64"
        raise ConfigError([problem])
    return value
