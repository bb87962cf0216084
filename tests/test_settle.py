"""What is measured at a start: agreed on by all ranks, kept by the run folder, without a trace."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from mcp_parallel import settle as module
from mcp_parallel.cli.main import main
from mcp_parallel.config import Config
from mcp_parallel.division import is_settled
from mcp_parallel.layout import Layout
from mcp_parallel.model.family import family_of
from mcp_parallel.parallel.layer_times import measure_layers
from mcp_parallel.parallel.mesh import build_mesh
from mcp_parallel.planner.balance import LayerCosts
from mcp_parallel.settle import FILE, choose, settle
from mcp_parallel.step import TrainingStep

SMALL = {"num_layers": 6, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 4, "ffn_size": 48}


def configure(layout, preset="tiny", **model):
    sizes = {**SMALL, **({"seq_len": 32} if preset == "tiny" else {}), **model}
    base = Config.from_mapping({"model": {"preset": preset, **sizes}})
    train = replace(base.train, global_batch_size=16, micro_batch_size=1)
    return replace(base, parallel=replace(base.parallel, **asdict(layout)), train=train)


BOTH = Layout(dp=2, pp=2, stage_split="measured", dp_shares="measured")


def times(*blocks, embedding=0.0, head=0.0):
    """Of each rank, the ends in blocks."""
    return [LayerCosts(embedding=embedding * b, block=b, head=head * b) for b in blocks]


# --- the choice ----------------------------------------------------------------------------------


def test_a_costly_head_has_fewer_blocks_beside_it():
    config = configure(Layout(pp=2, stage_split="measured"))
    assert choose(config, times(1.0, 1.0, head=2.0)).stage_split == (4, 2)
    assert choose(config, times(1.0, 1.0, embedding=2.0)).stage_split == (2, 4)


def test_a_slow_pipeline_rank_has_fewer_blocks():
    assert choose(configure(Layout(pp=2, stage_split="measured")), times(1.0, 2.0)).stage_split == (
        4,
        2,
    )


def test_a_slow_rank_slows_its_replica_and_its_stage_and_no_other():
    layout = replace(BOTH, stage_split="count")
    places = [layout.coordinate(rank) for rank in range(4)]
    of_rank = times(*(3.0 if (place.dp, place.pp) == (1, 1) else 1.0 for place in places))
    assert choose(configure(layout), of_rank).dp_shares == (12, 4)
    # Fewer blocks for its stage, in both replicas, leave nothing to share out.
    found = choose(configure(BOTH), of_rank)
    assert (found.stage_split, found.dp_shares) == ((5, 1), (8, 8))


def test_shares_stay_equal_where_little_would_be_gained():
    config = configure(Layout(dp=2, dp_shares="measured"))
    # 8 * 1.04 against 9 * 1: nothing to gain. 8 * 1.3 against 9 * 1: 15 % to gain.
    assert choose(config, times(1.0, 1.04)).dp_shares == (8, 8)
    assert choose(config, times(1.0, 1.3)).dp_shares == (9, 7)


def test_every_pipeline_keeps_the_micro_batches_that_it_needs():
    layout = replace(BOTH, stage_split="count", schedule="interleaved", virtual_stages=2)
    config = configure(layout)
    of_rank = [9.0 if layout.coordinate(rank).dp == 1 else 1.0 for rank in range(4)]
    assert choose(config, times(*of_rank)).dp_shares == (14, 2)


# --- agreement and the record --------------------------------------------------------------------


def settled(rank, world, config, folder, own, is_broken=False):
    """The strings that a rank trains with, ``own`` being what it measures."""
    mesh = build_mesh(Layout.from_config(config.parallel), torch.device("cpu"))
    assert mesh is not None
    folder = Path(folder) / ("" if rank == 0 else "not-shared")
    measured = [0]

    def measure(config, mesh):
        measured[0] += 1
        return own[rank]

    with mock.patch.object(module, "measure_layers", measure):
        found = settle(config, mesh, folder)
    assert is_settled(found)
    return found.parallel.stage_split, found.parallel.dp_shares, measured[0]


def test_all_ranks_agree_and_a_resumed_run_keeps_what_was_found(ranks, tmp_path):
    config, folder = configure(BOTH), str(tmp_path)
    # Each rank alone would choose something else.
    first = times(1.0, 2.0, 1.5, 3.0, head=1.0)
    found = ranks.run(settled, config, folder, first)
    assert len(set(found)) == 1
    assert found[0][2] == 1
    assert json.loads((tmp_path / FILE).read_text())["seconds"][3]["block"] == 3.0
    other = times(3.0, 1.0, 1.0, 1.0)
    again = ranks.run(settled, config, folder, other)
    assert [row[:2] for row in again] == [row[:2] for row in found]
    assert {row[2] for row in again} == {0}
    parallel = replace(config.parallel, stage_split="remeasured", dp_shares="remeasured")
    anew = ranks.run(settled, replace(config, parallel=parallel), folder, other)
    assert {row[2] for row in anew} == {1}
    assert anew[0][:2] != found[0][:2]


def test_a_record_of_another_layout_or_model_is_not_used(ranks, tmp_path):
    config, folder = configure(BOTH), str(tmp_path)
    own = times(1.0, 1.0, 1.0, 1.0, head=2.0)
    ranks.run(settled, config, folder, own)
    zbv = replace(config, parallel=replace(config.parallel, schedule="zbv"))
    assert ranks.run(settled, zbv, folder, own)[0][2] == 1
    wider = configure(BOTH, ffn_size=64)
    assert ranks.run(settled, wider, folder, own)[0][2] == 1
    split_only = replace(wider, parallel=replace(wider.parallel, dp_shares=None))
    assert ranks.run(settled, split_only, folder, own)[0] == ("4,2", None, 0)


def test_a_broken_record_is_named(ranks, tmp_path):
    (tmp_path / FILE).write_text("{")
    config = configure(Layout(pp=2, stage_split="measured"))
    with pytest.raises(AssertionError, match="remove it to measure again"):
        ranks.run(settled, config, str(tmp_path), times(1.0, 1.0), ranks=2)


# --- the measurement -----------------------------------------------------------------------------


def loss_after_measuring(rank, world, config, measures):
    mesh = build_mesh(Layout.from_config(config.parallel), torch.device("cpu"))
    assert mesh is not None
    found = measure_layers(config, mesh, rounds=1) if measures else None
    step = TrainingStep(config, mesh)
    rows, model = step.rows(), config.model
    shape = (len(rows), *family_of(model).input_shape(model, model.seq_len))
    inputs = torch.arange(torch.Size(shape).numel()).view(shape) % 251
    if model.family == "vit":
        inputs, targets = inputs / 251, torch.arange(len(rows)) % 10
    else:
        targets = inputs.roll(-1, 1)
    result = step(inputs, targets, 1e-3)
    dist.barrier()
    return found, result.loss, result.grad_norm


CASES = {
    "pp2 gpipe": configure(Layout(pp=2, schedule="gpipe")),
    "tied tp2pp2 zbv": configure(Layout(tp=2, pp=2, schedule="zbv"), tie_embeddings=True),
    "cp2 dp2 zero1": configure(Layout(dp=2, cp=2, zero=1)),
    "vit pp2": configure(Layout(pp=2), preset="vit-digits"),
}


@pytest.mark.parametrize("name", CASES)
def test_measuring_leaves_no_trace_in_training(ranks, name):
    config = CASES[name]
    world = Layout.from_config(config.parallel).world_size
    measured = ranks.run(loss_after_measuring, config, True, ranks=world)
    plain = ranks.run(loss_after_measuring, config, False, ranks=world)
    for (times, *figures), (_, *expected) in zip(measured, plain, strict=True):
        assert figures == expected
        assert times.block > 0
        assert min(times.embedding, times.head) >= 0


def test_a_run_goes_on_with_its_record_or_not_at_all(tmp_path, capfd):
    run = tmp_path / "run"
    sizes = [f"--set=model.{key}={value}" for key, value in {**SMALL, "seq_len": 16}.items()]
    command = ["train", "--pp=2", "--set=parallel.stage_split=measured", "--run-dir", str(run)]
    command += [*sizes, "--set=train.global_batch_size=4", "--set=train.micro_batch_size=1"]
    command += ["--set=monitor.tensorboard=false"]
    assert main([*command, "--steps=1"]) == 0
    record = json.loads((run / FILE).read_text())
    assert sum(record["stage_split"]) == 6
    # No measurement gives this split.
    (run / FILE).write_text(json.dumps({**record, "stage_split": [6, 0]}))
    assert main([*command, "--steps=2", "--resume"]) != 0
    assert "must give each of 2 stages at least one of num_layers = 6" in capfd.readouterr().err
