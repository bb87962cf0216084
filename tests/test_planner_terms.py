"""Each term of the cost model against a case computed by hand, or against a simulation."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcp_parallel.config import ModelConfig
from mcp_parallel.layout import Layout
from mcp_parallel.planner import block, links, pipeline, roofline, sharding
from mcp_parallel.planner.cost import CostModel
from mcp_parallel.planner.flops import flops_per_token
from mcp_parallel.planner.hardware import HARDWARE, Hardware
from mcp_parallel.planner.layouts import Job, PlannedLayout
from mcp_parallel.planner.published import RUNS, llama3
from mcp_parallel.planner.runtime import OURS
from mcp_parallel.planner.shape import shape_of
from mcp_parallel.planner.stages import rank_parameters, rank_stages
from mcp_parallel.planner.topology import Group, group_of, members_in_domain
from mcp_parallel.presets import num_parameters
from mcp_parallel.schedules.build import build_plan
from mcp_parallel.schedules.simulate import Costs, simulate

# Round figures: a FLOP and a byte take a power of ten of a second each.
PLAIN = Hardware(
    name="plain",
    peak_flops={"bf16": 1e12, "fp8": 2e12, "fp32": 5e11},
    memory_bytes=10**11,
    memory_bytes_per_s=1e11 / roofline.MEMORY_EFFICIENCY,
    domain_ranks=8,
    domain_bytes_per_s=1e10 / links.LINK_EFFICIENCY,
    network_bytes_per_s=1e9 / links.LINK_EFFICIENCY,
    domain_latency_s=1e-6,
    network_latency_s=1e-5,
    op_overhead_s=0.0,
    overlap_slowdown=0.0,
    matmul_efficiency=0.5,
    half_efficiency_side=1000.0,
)


def layout_of(**changes):
    plain = PlannedLayout(1, 1, 1, 1, "1f1b", 1, 1, 0, "none")
    return plain._replace(**changes)


# --- work ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "tokens_per_s", "tflops"),
    [("8b", 14451, 744), ("70b", 1602, 719), ("70b", 1621, 728), ("405b", 311, 784)],
)
def test_work_of_a_token_is_that_of_published_tables(size, tokens_per_s, tflops):
    """Both columns are rounded to a whole number."""
    for rate in (tokens_per_s - 0.5, tokens_per_s + 0.5):
        assert rate * flops_per_token(llama3(size)) / 1e12 == pytest.approx(
            tflops, abs=0.5 + tflops / tokens_per_s
        )


def test_work_of_a_token_by_hand():
    model = ModelConfig(
        preset=None,
        num_layers=2,
        hidden_size=4,
        num_heads=2,
        num_kv_heads=1,
        ffn_size=3,
        vocab_size=5,
        seq_len=6,
    )
    # q and o 16 each, k and v 8 each, three of 12; the head 20.
    matrices = 2 * (16 + 16 + 8 + 8 + 36) + 20
    # Scores and their product with v: 2 * 6 * 4 each, half of it causal.
    attention = 2 * (2 * 2 * 6 * 4)
    assert flops_per_token(model, causal=False) == 6 * matrices + 3 * attention
    assert flops_per_token(model) == 6 * matrices + 3 * attention / 2


# --- one operation -------------------------------------------------------------------------------


def test_matmul_by_hand():
    # e = 1/2 for each side of 1000: 2e9 operations at 1e12 * 0.5 / 8.
    assert roofline.matmul_seconds(PLAIN, 1000, 1000, 1000, "bf16") == pytest.approx(0.032)
    # fp8: twice the peak and twice the half side: e = 1/3.
    expected = 2e9 / (2e12 * 0.5 / 27)
    assert roofline.matmul_seconds(PLAIN, 1000, 1000, 1000, "fp8") == pytest.approx(expected)
    # A row times a matrix is bound by the matrix's bytes.
    fast = dataclasses.replace(PLAIN, half_efficiency_side=1e-9)
    seconds = 2 * (1000 * 1000 + 2 * 1000) / 1e11
    assert roofline.matmul_seconds(fast, 1, 1000, 1000, "bf16") == pytest.approx(seconds)


def test_matmuls_of_an_h100():
    """By hand: 2 s^3 / (989.4e12 * 0.8 * (s / (s + 128))^3) + 3 us."""
    card = dataclasses.replace(HARDWARE["h100"], matmul_efficiency=0.8)
    for side, expected in ((1024, 313), (2048, 592), (4096, 711), (8192, 754)):
        rate = 2 * side**3 / roofline.matmul_seconds(card, side, side, side, "bf16") / 1e12
        assert rate == pytest.approx(expected, abs=0.5)


def test_attention_by_hand():
    # Half of the half-length's efficiency, 0.8 of 0.5 of the peak.
    seconds = roofline.attention_seconds(PLAIN, 1e9, roofline.ATTENTION_HALF_LENGTH, "bf16", 0.8)
    assert seconds == pytest.approx(1e9 / (1e12 * 0.5 * 0.8 / 2))
    assert roofline.attention_seconds(PLAIN, 1e9, 512, "fp8", 0.8) == pytest.approx(seconds)


# --- links ---------------------------------------------------------------------------------------


def test_collectives_by_hand():
    within = links.all_gather_seconds(8e9, Group(8, 8), PLAIN)
    assert within == pytest.approx(8e9 * 7 / 8 / 1e10 + 3e-6)
    # Two domains of four: half of the bytes come in over four ports.
    over = links.all_gather_seconds(8e9, Group(8, 4), PLAIN)
    assert over == pytest.approx(max(0.7, 4e9 / 4e9) + 2e-6 + 1e-5)
    alone = links.all_gather_seconds(8e9, Group(4, 1), PLAIN)
    assert alone == pytest.approx(8e9 * 3 / 4 / 1e9 + 2e-5)
    assert links.all_reduce_seconds(8e9, Group(8, 8), PLAIN) == 2 * within
    assert links.all_gather_seconds(8e9, Group(1, 1), PLAIN) == 0
    assert links.message_seconds(1e9, Group(4, 1), PLAIN) == pytest.approx(1 + 1e-5)
    assert links.message_seconds(1e9, Group(4, 4), PLAIN) == pytest.approx(0.1 + 1e-6)


@settings(deadline=None, max_examples=60)
@given(
    tp=st.sampled_from([1, 2, 4]),
    cp=st.sampled_from([1, 2, 3]),
    dp=st.sampled_from([1, 2, 4, 6]),
    pp=st.sampled_from([1, 2, 3, 4]),
    domain=st.sampled_from([1, 4, 8, 12]),
    order=st.sampled_from(["dp-pp-cp-tp", "pp-dp-cp-tp"]),
)
def test_groups_have_no_more_neighbours_than_ranks_are_numbered(tp, cp, dp, pp, domain, order):
    """Against the layout itself: members of each group in each domain, the fewest of a group."""
    layout = layout_of(dp=dp, tp=tp, pp=pp, cp=cp, rank_order=order)
    hardware = dataclasses.replace(PLAIN, domain_ranks=domain)
    real = Layout(dp=dp, tp=tp, pp=pp, cp=cp, rank_order=order)
    axes = {"tp": ("pp", "dp", "cp"), "cp": ("pp", "dp", "tp"), "dp_cp": ("pp", "tp")}
    axes["pp"] = ("dp", "cp", "tp")
    for axis, others in axes.items():
        groups: dict[tuple[int, ...], Counter[int]] = {}
        for rank in range(real.world_size):
            place = real.coordinate(rank)
            key = tuple(getattr(place, name) for name in others)
            groups.setdefault(key, Counter())[rank // domain] += 1
        ours = group_of(axis, layout, hardware)
        assert ours.ranks == sum(next(iter(groups.values())).values())
        # Every group's domains, on average, have at least as many members as we count on.
        assert ours.local <= min(max(members.values()) for members in groups.values())
        is_regular = all(n & (n - 1) == 0 for n in (tp, cp, dp, pp, domain))
        if is_regular and (domain >= tp * cp or axis == "tp"):
            fewest = min(min(members.values()) for members in groups.values())
            assert ours.local == fewest, axis


def test_members_of_groups_that_do_not_fit():
    assert members_in_domain(8, 1, 8) == 8
    assert members_in_domain(16, 2, 8) == 4
    assert members_in_domain(4, 16, 8) == 1
    assert members_in_domain(6, 1, 8) == 3  # groups 0-5, 6-11: the second is cut in two


# --- pipeline ------------------------------------------------------------------------------------

_PIPELINES = [
    ("gpipe", 1),
    ("1f1b", 1),
    ("interleaved", 2),
    ("interleaved", 3),
    ("zero_bubble", 1),
    ("zero_bubble", 2),
    ("zbv", 2),
    ("dualpipev", 2),
]


@pytest.mark.parametrize(("schedule", "stages"), _PIPELINES)
@pytest.mark.parametrize("pp", [2, 4, 6])
@pytest.mark.parametrize("times", [2, 4])
def test_bubble_and_messages_are_those_of_the_simulated_schedule(schedule, stages, pp, times):
    count, each, message = times * pp, 1.0 / stages, 0.01
    plan = build_plan(schedule, pp, count, stages)
    alone = simulate(plan, Costs(each, each, each, 0.0)).makespan
    waiting = simulate(plan, Costs(each, each, each, message)).makespan
    units = pipeline.bubble_units(schedule, pp, stages)
    assert alone == pytest.approx(3.0 * (count + units))
    added = pipeline.exposed_messages_seconds(schedule, pp, stages, count, message, 3.0)
    assert waiting - alone == pytest.approx(added)


def test_links_that_are_busier_than_the_ranks_set_the_pace():
    added = pipeline.exposed_messages_seconds("interleaved", 2, 4, 10, 1.0, 3.0)
    assert added == 2 * (2 * 4 - 1) * 1.0 + 10 * (2 * 4 * 1.0 - 3.0)
    assert pipeline.exposed_messages_seconds("1f1b", 1, 1, 10, 1.0, 3.0) == 0


@pytest.mark.parametrize(("schedule", "stages"), _PIPELINES)
@pytest.mark.parametrize("pp", [2, 4])
def test_live_microbatches_are_those_of_the_plan(schedule, stages, pp):
    plan = build_plan(schedule, pp, 4 * pp, stages)
    for rank in range(pp):
        alive = most = 0
        for action in plan.orders[rank]:
            alive += (action.kind == "F") - (action.kind in "BI")
            most = max(most, alive)
        ours = pipeline.live_microbatches(schedule, pp, stages, 4 * pp, rank)
        if schedule == "zero_bubble":  # factors of waiting weight gradients are counted with them
            assert most / stages <= ours <= pp + (stages > 1)
        else:
            assert ours == most / stages


# --- data parallelism ----------------------------------------------------------------------------


def _job(**changes):
    job = Job(model=llama3("8b"), ranks=8, hardware=PLAIN, global_batch_size=64)
    return dataclasses.replace(job, **changes)


def test_gradients_are_hidden_as_far_as_there_is_work_beside_them():
    job, group, parameters, layers = _job(), Group(8, 8), 8e8, 7
    # Eight parts of 1e8 elements: fp32 gradients take 7 / 8 * 4e8 bytes of 1e10 a second, and 3 us.
    reduce = 0.035 + 3e-6
    gather = reduce_of_2 = 0.0175 + 3e-6
    windows = sharding.Windows(1.0, 1.0, 1.0, 1.0)

    def seconds(zero, windows=windows, pp=1):
        layout = layout_of(dp=8, zero=zero, pp=pp)
        return sharding.sharding_seconds(job, layout, group, parameters, layers, windows)

    assert seconds(0) == pytest.approx(2 * reduce)
    assert seconds(1) == pytest.approx(reduce + gather)
    assert seconds(2) == pytest.approx(8 * reduce + gather)
    assert seconds(3) == pytest.approx(8 * (gather + reduce + reduce_of_2))
    short = sharding.Windows(0.1, 0.1, 0.1, 0.1)
    assert seconds(0, short) == pytest.approx(2 * reduce + 14 * reduce - 0.1)
    none = sharding.Windows(0.0, 0.0, 0.0, 0.0)
    assert seconds(1, none) == pytest.approx(8 * (reduce + gather))
    alone = sharding.sharding_seconds(job, layout_of(), Group(1, 1), 8e8, 7, windows)
    assert alone == 0


def test_hidden_communication_slows_work_down():
    slow = dataclasses.replace(PLAIN, overlap_slowdown=0.25)
    assert block.exposed(2.0, 5.0, slow) == 0.5
    assert block.exposed(2.0, 1.0, slow) == 1.0 + 0.25
    all_exposed = dataclasses.replace(PLAIN, overlap_slowdown=1.0)
    assert block.exposed(2.0, 5.0, all_exposed) == 2.0


def test_windows_of_several_stages_are_longer():
    one = sharding.windows_of(layout_of(pp=4), 8, 1.0, 2.0)
    assert one == (1.0, 2.0, 1.0, 2.0)
    two = sharding.windows_of(
        layout_of(pp=4, schedule="interleaved", virtual_stages=2), 8, 1.0, 2.0
    )
    assert two == (1.0, 2.0, 2.5, 5.0)


def test_optimizer_reads_its_own_part():
    job = _job()
    whole = sharding.optimizer_seconds(job, layout_of(dp=8), 8, 1e9)
    assert whole == pytest.approx(34e9 / 1e11)
    assert sharding.optimizer_seconds(job, layout_of(dp=8, zero=1), 8, 1e9) == whole / 8


# --- a block, a step -----------------------------------------------------------------------------


def test_block_by_hand():
    """One collective of four in a pass, and what checkpointing adds."""
    job = _job()
    tokens, group = 8192, Group(2, 2)

    def time_of(checkpointing):
        return block.block_time(
            job,
            tokens=tokens,
            tp=2,
            tp_group=group,
            cp_group=Group(1, 1),
            checkpointing=checkpointing,
        )

    none, selective, full = (time_of(level) for level in ("none", "selective", "full"))
    each = 2 * tokens * 4096 / 2 / 1e10 + 1e-6
    assert none.forward_tp == none.backward_tp == pytest.approx(4 * each)
    assert full.backward_tp == pytest.approx(7 * each)
    cheap = 2 * tokens * (10 * 4096 + 2 * (4096 + 1024) + 3 * 14336) / 2 / 1e11
    assert block.cheap_seconds(job, tokens, 2) == pytest.approx(cheap)
    assert selective.backward - none.backward == pytest.approx(0.6 * cheap)
    w2 = roofline.matmul_seconds(PLAIN, tokens, 4096, 7168, "bf16")
    assert full.backward_compute - none.backward_compute == pytest.approx(none.forward_compute - w2)
    linear = block.linear_seconds(job, tokens, 2)
    forward, backward = block.attention_pair(job, tokens, 2, 1)
    assert none.forward_compute == pytest.approx(linear + forward + cheap)
    assert none.backward_compute == pytest.approx(2 * linear + backward + 2 * cheap)
    assert time_of("none").forward_cp == 0


def test_casts_to_fp8_by_hand():
    """h = q = 4096, kv = 1024, f = 14336; a rank's own largest value, cast and transpose are 7."""
    job, tokens, rate = _job(precision="fp8"), 8192, PLAIN.memory_bytes_per_s
    inputs, grads = 2 * 4096 + 4096 + 14336, 2 * 4096 + 4096 + 2 * 1024 + 2 * 14336
    plain = block.cast_seconds(job, tokens, 1)
    rate *= roofline.MEMORY_EFFICIENCY
    assert plain == pytest.approx([7 * tokens * n / rate for n in (inputs, grads)])
    fused = dataclasses.replace(OURS, fuses_casts=True, gathers_fp8=True)
    made = 2 * 4096 + 14336  # by norms and SwiGLU: not read for their largest value
    both = block.cast_seconds(dataclasses.replace(job, runtime=fused), tokens, 1)
    expected = [tokens * (6 * inputs - 2 * made) / rate, 6 * tokens * grads / rate]
    assert both == pytest.approx(expected)
    either_way = dataclasses.replace(PLAIN, transposes_fp8=False)
    blackwell = dataclasses.replace(job, hardware=either_way, runtime=fused)
    expected = [tokens * (5 * inputs - 2 * made) / rate, 5 * tokens * grads / rate]
    assert block.cast_seconds(blackwell, tokens, 1) == pytest.approx(expected)
    # Two ranks cast half of what lies between their regions, and gather it before the matmuls.
    cut = [(5 * (4096 + 4096 // 2 + 7168) - 2 * (4096 + 7168)), 5 * (4096 + 2048 + 1024 + 14336)]
    assert block.cast_seconds(blackwell, tokens, 2) == pytest.approx(
        [tokens * n / rate for n in cut]
    )
    assert block.cast_seconds(_job(), tokens, 1) == (0, 0)


def test_gathers_in_fp8_take_half_the_bytes():
    job, tokens, group = _job(precision="fp8"), 8192, Group(2, 2)
    narrow = dataclasses.replace(
        job, runtime=dataclasses.replace(OURS, gathers_fp8=True, saves_gathered=False)
    )
    whole = block.tp_collective_seconds(job, tokens, group)
    half = block.tp_gather_seconds(narrow, tokens, group)
    assert whole - half == pytest.approx(tokens * 4096 / 2 / 1e10)
    time = block.block_time(
        narrow, tokens=tokens, tp=2, tp_group=group, cp_group=Group(1, 1), checkpointing="none"
    )
    # A block gathers and sums twice in a pass, and gathers its inputs again on the way back.
    assert time.forward_tp == pytest.approx(2 * (half + whole))
    assert time.backward_tp == pytest.approx(4 * half + 2 * whole)
    bf16 = dataclasses.replace(narrow, precision="bf16")
    assert block.tp_gather_seconds(bf16, tokens, group) == whole


def test_context_parallel_blocks_move_keys_and_values():
    job = _job()
    forward, backward = block.context_seconds(job, 2048, 1, Group(4, 4), 1.0, 1.0)
    seconds = 2 * (2048 * 2 * 1024) * 4 * 3 / 4 / 1e10 + 2e-6
    assert (forward, backward) == pytest.approx((seconds, 2 * seconds))
    ring = dataclasses.replace(job, runtime=dataclasses.replace(job.runtime, cp_overlaps=True))
    merge = 12 * 3 * 2048 * 4096 / 1e11
    assert block.context_seconds(ring, 2048, 1, Group(4, 4), 1.0, 1.0)[0] == pytest.approx(merge)


@pytest.mark.parametrize("run", RUNS[::6], ids=lambda run: run.name)
def test_parts_of_a_step_sum_up_and_beat_no_physics(run):
    model = CostModel(run.job)
    tp, pp, cp = run.layout["tp"], run.layout["pp"], run.layout["cp"]
    layout = layout_of(dp=run.degrees[0], tp=tp, pp=pp, cp=cp, zero=1)
    cost = model.step(layout)
    assert sum(cost.parts().values()) == pytest.approx(cost.step_s)
    assert min(cost.parts().values()) >= 0
    peak = run.hardware.peak(run.precision) * run.hardware.matmul_efficiency
    assert cost.tflops(run.job) * 1e12 < peak
    assert 0 <= cost.bubble < 1


def test_every_parameter_is_on_some_rank():
    for tied in (False, True):
        model = dataclasses.replace(llama3("8b"), tie_embeddings=tied)
        for pp, schedule, virtual in ((1, "1f1b", 1), (4, "1f1b", 1), (4, "interleaved", 3)):
            layout = layout_of(pp=pp, schedule=schedule, virtual_stages=virtual)
            stages = rank_stages(model.num_layers, layout)
            assert sum(rank.layers for rank in stages) == model.num_layers
            total = sum(rank_parameters(shape_of(model), rank, 1) for rank in stages)
            # A tied table is on the first and on the last rank.
            copies = model.vocab_size * model.hidden_size if tied and pp > 1 else 0
            assert total == num_parameters(model) + copies


def test_formats_that_a_card_lacks_are_refused():
    with pytest.raises(ValueError, match=r"train\.precision must be"):
        HARDWARE["a100"].peak("fp8")
    for card in HARDWARE.values():
        assert card.source
        assert card.peak("bf16") > card.peak("fp32")
        assert math.isfinite(card.network_bytes_per_s)
