"""Splits and shares that cannot run are refused before anything starts, with ways out that work."""

from __future__ import annotations

import pytest
from configs import assert_ways_out, config_of, names

from mcp_parallel.check import check, find_layouts, find_problems
from mcp_parallel.rules.layout import legal_layouts_near

PP2, DP2 = {"parallel__pp": 2}, {"parallel__dp": 2}
REFUSED = [
    ({**PP2, "parallel__stage_split": "cost"}, "stage_split word"),
    ({**PP2, "parallel__stage_split": ""}, "stage_split word"),
    ({**PP2, "parallel__stage_split": "2,-2"}, "stage_split word"),
    ({**PP2, "parallel__stage_split": "2,2.0"}, "stage_split word"),
    ({**PP2, "parallel__stage_split": "3,2"}, "stage_split numbers"),
    ({**PP2, "parallel__stage_split": "4,0"}, "stage_split numbers"),
    ({**PP2, "parallel__stage_split": "2,1,1"}, "stage_split numbers"),
    ({**PP2, "parallel__stage_split": "2,2", "parallel__schedule": "zbv"}, "stage_split numbers"),
    ({**DP2, "parallel__dp_shares": "fast"}, "dp_shares word"),
    ({**DP2, "parallel__dp_shares": "3,0"}, "dp_shares word"),
    ({**DP2, "parallel__dp_shares": "1,1,2"}, "dp_shares over dp"),
    ({**DP2, "parallel__dp_shares": "3"}, "dp_shares over dp"),
    ({**DP2, "parallel__dp_shares": "3,1", "parallel__zero": 3}, "dp_shares with zero"),
    ({**DP2, "parallel__dp_shares": "measured", "parallel__zero": 2}, "dp_shares with zero"),
    (
        {**DP2, "parallel__dp_shares": "3,1", "train__optimizer": "onebit_adam"},
        "dp_shares with onebit_adam",
    ),
    # 16 samples are no multiple of 3 * 4.
    ({**DP2, "parallel__dp_shares": "2,1"}, "global_batch_size over dp * micro_batch_size"),
    # 3 and 1 micro-batches: too few for two stages.
    ({**DP2, **PP2, "parallel__dp_shares": "3,1"}, "micro-batches over pp"),
    (
        {"parallel__dp": 8, "parallel__dp_shares": "measured"},
        "global_batch_size over measured shares",
    ),
]


@pytest.mark.parametrize(("changes", "name"), REFUSED, ids=[str(row[0]) for row in REFUSED])
def test_is_refused_with_ways_out(changes, name):
    config = config_of(**changes)
    assert names(config) == [name]
    assert_ways_out(config)


TAKEN = [
    {**PP2, "parallel__stage_split": "1,3"},
    {**PP2, "parallel__stage_split": "measured", "parallel__dp": 2, "parallel__dp_shares": "1,1"},
    {**PP2, "parallel__stage_split": "1,1,1,1", "parallel__schedule": "zbv"},
    {**DP2, "parallel__dp_shares": "3,1", "parallel__zero": 1},
    # In proportion, in whatever numbers.
    {**DP2, "parallel__dp_shares": "300, 100"},
    # Equal shares are plain data parallelism.
    {**DP2, "parallel__dp_shares": "2,2", "parallel__zero": 3},
    {**DP2, "parallel__dp_shares": "measured", "parallel__zero": 1},
    {**DP2, **PP2, "parallel__dp_shares": "3,1", "train__micro_batch_size": 2},
]


@pytest.mark.parametrize("changes", TAKEN, ids=str)
def test_is_taken(changes):
    check(config_of(**changes))


def test_other_degrees_drop_numbers_that_were_for_these():
    config = config_of(parallel__pp=2, parallel__dp=2, parallel__stage_split="2,1,1")
    problems = find_problems(config)
    assert [problem.name for problem in problems] == ["stage_split numbers"]
    layouts = find_layouts(config, problems)
    assert layouts
    for layout in layouts:
        assert layout["parallel.stage_split"] == "count"
    shares = config_of(parallel__dp=2, parallel__dp_shares="3,1")
    for layout in legal_layouts_near(shares, 4):
        assert layout["parallel.dp_shares"] is None
