"""What a trainer cannot do is no choice of the planner's: stages that differ, levels it lacks."""

from __future__ import annotations

import dataclasses

from mcp_parallel.planner.hardware import HARDWARE
from mcp_parallel.planner.layouts import Job
from mcp_parallel.planner.published import RUNS, llama3
from mcp_parallel.planner.runtime import OURS
from mcp_parallel.planner.search import search


def test_a_trainer_without_uneven_stages_takes_only_what_divides():
    """Megatron-LM of 2024 refuses 92 blocks on 8 ranks; on 4 it has 1 or 23 stages a rank."""
    run = next(run for run in RUNS if run.name == "GPT 119B")
    found = search(run.job, fixed={"tp": 8, "cp": 1})
    assert {one.layout.pp for one in found.ranked} == {2, 4}
    for one in found.ranked:
        assert run.model.num_layers % one.layout.num_stages == 0
    uneven = next(one for one in found.refused if one.layout.pp == 8)
    assert uneven.reason == "stages of unequal numbers of blocks"
    runtime = dataclasses.replace(run.runtime, has_uneven=True)
    free = search(dataclasses.replace(run.job, runtime=runtime), fixed={"tp": 8, "cp": 1})
    assert 8 in {one.layout.pp for one in free.ranked}


def test_a_trainer_takes_its_own_levels_of_checkpointing():
    runtime = dataclasses.replace(OURS, checkpointing=("none", "full"))
    job = Job(
        model=llama3("70b"),
        ranks=64,
        hardware=HARDWARE["h100"],
        global_batch_size=64,
        runtime=runtime,
    )
    levels = {one.layout.activation_checkpointing for one in search(job).ranked}
    assert levels == {"none", "full"}
    found = search(job, fixed={"activation_checkpointing": "selective"})
    assert not found.ranked
    assert found.reasons()["no such checkpointing"] > 0
    assert "mcp_parallel has none, full" in {one.detail for one in found.refused}
