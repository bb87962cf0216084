from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mcp_parallel.config import ParallelConfig
from mcp_parallel.layout import Layout, split_dim, split_layers

DEGREES = [(1, 1, 1, 1), (2, 1, 1, 1), (1, 2, 1, 1), (1, 1, 2, 1), (1, 1, 1, 2), (2, 3, 4, 5)]


ORDERS = ("dp-pp-cp-tp", "pp-dp-cp-tp")


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dp, tp, pp, cp", DEGREES)
def test_ranks_are_numbered_in_the_order_that_is_named(dp, tp, pp, cp, order):
    layout = Layout(dp=dp, tp=tp, pp=pp, cp=cp, rank_order=order)
    places = [layout.coordinate(rank) for rank in range(layout.world_size)]
    axes = order.split("-")
    every = itertools.product(*(range(getattr(layout, axis)) for axis in axes))
    assert [tuple(getattr(place, axis) for axis in axes) for place in places] == list(every)
    assert [layout.rank_of(place) for place in places] == list(range(layout.world_size))


@pytest.mark.parametrize("order", ORDERS)
def test_places_have_one_order_whatever_the_ranks_have(order):
    layout = Layout(dp=2, tp=3, pp=4, cp=5, rank_order=order)
    places = list(layout.places())
    every = itertools.product(range(4), range(2), range(5), range(3))
    assert [(place.pp, place.dp, place.cp, place.tp) for place in places] == list(every)
    assert [layout.place_index(place) for place in places] == list(range(layout.world_size))


@pytest.mark.parametrize("order", ORDERS)
def test_ranks_that_share_parameters_are_numbered_through(order):
    layout = Layout(dp=2, tp=2, pp=2, cp=3, rank_order=order)
    places = [layout.coordinate(rank) for rank in range(layout.world_size)]
    assert layout.dp_cp == 6
    for pp, tp in itertools.product(range(2), range(2)):
        line = [place for place in places if (place.pp, place.tp) == (pp, tp)]
        assert [layout.data_index(place) for place in line] == list(range(6))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dp, tp, pp, cp", DEGREES)
def test_the_runs_of_a_stage_are_its_ranks(dp, tp, pp, cp, order):
    layout = Layout(dp=dp, tp=tp, pp=pp, cp=cp, rank_order=order)
    for stage in range(pp):
        ranks = [
            rank for first, past in layout.ranks_at_stage(stage) for rank in range(first, past)
        ]
        every = range(layout.world_size)
        assert ranks == [rank for rank in every if layout.coordinate(rank).pp == stage]


def test_replicas_are_farthest_apart_unless_asked_otherwise():
    assert {Layout(dp=2, tp=2, pp=2).coordinate(rank).dp for rank in range(4)} == {0}
    stages_apart = Layout(dp=2, tp=2, pp=2, rank_order="pp-dp-cp-tp")
    assert {stages_apart.coordinate(rank).pp for rank in range(4)} == {0}


def test_layout_takes_every_degree_of_its_table():
    parallel = ParallelConfig(
        dp=2,
        tp=3,
        pp=4,
        cp=2,
        zero=2,
        schedule="interleaved",
        virtual_stages=5,
        sequence_parallel=False,
        rank_order="pp-dp-cp-tp",
    )
    layout = Layout.from_config(parallel)
    for field in (
        "dp",
        "tp",
        "pp",
        "cp",
        "zero",
        "schedule",
        "virtual_stages",
        "sequence_parallel",
        "rank_order",
    ):
        assert getattr(layout, field) == getattr(parallel, field)
    assert layout.world_size == 48
    assert layout.num_stages == 20


def test_virtual_stages_go_round_the_ranks():
    layout = Layout(pp=3, virtual_stages=2, schedule="interleaved")
    assert [layout.stage_owner(stage) for stage in range(6)] == [0, 1, 2, 0, 1, 2]


@given(num_layers=st.integers(0, 200), num_stages=st.integers(1, 40))
@settings(deadline=None)
def test_no_layer_is_lost_or_run_twice(num_layers, num_stages):
    stages = split_layers(num_layers, num_stages)
    assert len(stages) == num_stages
    assert [layer for stage in stages for layer in stage] == list(range(num_layers))
    sizes = [len(stage) for stage in stages]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@given(size=st.integers(0, 100), parts=st.integers(1, 12))
@settings(deadline=None)
def test_a_dim_is_cut_as_torch_cuts_it(size, parts):
    pieces = [piece.tolist() for piece in torch.arange(size).chunk(parts)] if size else []
    pieces += [[]] * (parts - len(pieces))  # torch leaves empty parts out
    for index, piece in enumerate(pieces):
        offset, length = split_dim(size, parts, index)
        assert list(range(offset, offset + length)) == piece
