"""Figures by layer: equal to their definition on one rank, and the same in every layout."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from health_runs import configure, lines, train
from torch import nn

from mcp_parallel.config import Config
from mcp_parallel.data.source import open_data, source_of
from mcp_parallel.layout import Layout
from mcp_parallel.monitor import parameters
from mcp_parallel.monitor.activations import Activations
from mcp_parallel.monitor.fields import FIELDS
from mcp_parallel.monitor.parameters import Sample
from mcp_parallel.parallel.mesh import build_mesh
from mcp_parallel.parallel.shards import Shard
from mcp_parallel.step import TrainingStep

LAYOUTS = {
    "dp2": Layout(dp=2),
    "tp2": Layout(tp=2),
    "tp2 no-sp": Layout(tp=2, sequence_parallel=False),
    "pp2": Layout(pp=2),
    "cp2": Layout(cp=2),
    "dp2 zero3": Layout(dp=2, zero=3),
    # 42 units and 2 key heads over two ranks, each of them sharded: the most that meets in one.
    "dp2tp2 zero2": Layout(dp=2, tp=2, zero=2),
    "dp2pp2 zbv": Layout(dp=2, pp=2, schedule="zbv"),
}


def run(rank, world, config, steps=2):
    """Fields of the last step, after some training, and the step itself."""
    step = TrainingStep(
        config, build_mesh(Layout.from_config(config.parallel), torch.device("cpu"))
    )
    source = source_of(open_data(config), config)
    for index in range(steps):
        inputs, targets = (torch.from_numpy(x) for x in source.batch(index, step.rows()))
        result = step(inputs, targets, 1e-3, step=index)
    return result.health.fields() if result.health is not None else None


def worst_difference(got, want):
    """Over all figures but those of memory; relative."""
    assert set(got) == set(want)
    worst = 0.0
    for name, figures in want.items():
        if FIELDS[name].kind == "layers":
            assert list(got[name]) == list(figures)
            pairs = [(got[name][layer], figure) for layer, figure in figures.items()]
        elif FIELDS[name].kind == "number":
            pairs = [(got[name], figures)]
        else:
            continue
        for a, b in pairs:
            worst = max(worst, abs(a - b) / max(abs(b), 1e-9))
    return worst


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_every_layout_gives_the_same_figures(ranks, layout):
    # float64: sums in another order, a few hundred terms deep; a part counted twice is 1e0.
    config = configure(layout, model={"tie_embeddings": True}, train={"precision": "fp64"})
    alone = run(0, 1, replace(config, parallel=configure().parallel))
    results = ranks.run(run, config, ranks=layout.world_size)
    for got in results:
        assert worst_difference(got, alone) < 1e-10
    assert len(results[0]["memory_bytes_by_rank"]) == layout.world_size
    assert all(figure > 2**20 for figure in results[0]["memory_bytes_by_rank"])


def test_float32_agrees_to_a_hundred_thousandth(ranks):
    layout = LAYOUTS["dp2tp2 zero2"]
    # One step: from the second on, Adam turns rounding noise of single elements into full moves.
    config = configure(layout, monitor={"health_every": 1})
    alone = run(0, 1, replace(config, parallel=configure().parallel), 1)
    got = ranks.run(run, config, 1, ranks=layout.world_size)[0]
    # A mean is a small difference of large sums: it is held against the deviation instead.
    for layer, mean in got.pop("activation_mean_by_layer").items():
        deviation = math.sqrt(alone["activation_variance_by_layer"][layer])
        assert abs(mean - alone["activation_mean_by_layer"][layer]) < 1e-5 * deviation
    del alone["activation_mean_by_layer"]
    assert worst_difference(got, alone) < 1e-5


def test_figures_are_what_they_are_called():
    config = configure(train={"precision": "fp64", "clip_norm": 0.0}, monitor={"health_every": 1})
    step = TrainingStep(config, build_mesh(Layout(), torch.device("cpu")))
    model, source = step.stages[0].model, source_of(open_data(config), config)
    outputs, units = [], []
    block = model.blocks["2"]
    block.register_forward_hook(lambda *args: outputs.append(args[2].detach().clone()))
    block.ffn.w2.register_forward_pre_hook(lambda _, args: units.append(args[0].detach().clone()))
    with torch.no_grad():
        block.ffn.w1.weight[5:8] = 0  # silu(0) = 0: three units that nothing wakes
    inputs, targets = (torch.from_numpy(x) for x in source.batch(0, range(8)))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    found = step(inputs, targets, 1e-3).health.fields()

    def norm(tensors, chosen=lambda tensor: True):
        flat = [t.flatten() for name, t in tensors.items() if "blocks.2." in name and chosen(t)]
        return torch.cat(flat).norm().item()

    grads = {name: p.grad for name, p in model.named_parameters()}
    moved = {name: p.detach() - before[name] for name, p in model.named_parameters()}
    assert found["grad_norm_by_layer"]["blocks.2"] == pytest.approx(norm(grads), rel=1e-12)
    assert found["weight_norm_by_layer"]["blocks.2"] == pytest.approx(norm(before), rel=1e-12)
    ratio = norm(moved, lambda t: t.dim() > 1) / norm(before, lambda t: t.dim() > 1)
    assert found["update_ratio_by_layer"]["blocks.2"] == pytest.approx(ratio, rel=1e-12)
    count = sum(p.numel() for name, p in before.items() if "blocks.2." in name)
    assert found["grad_norm_per_million_by_layer"]["blocks.2"] == pytest.approx(
        norm(grads) / math.sqrt(count / 1e6), rel=1e-12
    )
    whole = torch.cat(outputs)
    assert len(outputs) == 8
    assert found["activation_mean_by_layer"]["blocks.2"] == pytest.approx(whole.mean().item())
    assert found["activation_variance_by_layer"]["blocks.2"] == pytest.approx(
        whole.var(correction=0).item()
    )
    assert (torch.cat(units).abs().amax((0, 1)) < 1e-4).sum() == 3
    assert found["dead_share_by_layer"]["blocks.2"] == 3 / 42
    assert not block._forward_hooks.keys() - {next(iter(block._forward_hooks))}


def test_a_unit_is_awake_whichever_token_of_whichever_micro_batch_wakes_it():
    config = configure()
    mesh = build_mesh(Layout(), torch.device("cpu"))
    [stage] = TrainingStep(config, mesh).stages
    last = {index: block.ffn.w2 for index, block in stage.model.blocks.items()}
    looks = Activations([stage], mesh, config.model.num_layers)
    first = torch.ones(2, 100, 42)
    first[..., 3:6] = 0.9e-4  # three units that stay below
    first[1, 99, 4] = -1.1e-4  # one of which the last token wakes
    second = torch.full((2, 100, 42), 1e-9)
    second[0, 80, 5] = 1.0  # and one a token of the next micro-batch
    for batch in (first, second):
        last["1"](batch)
        last["2"](batch.flip(0, 1))
    last["3"](torch.ones(1, 1, 42))  # all at the first look
    last["3"](second)
    looks.remove()
    last["1"](torch.ones(2, 100, 42))
    assert looks.share()[:, 3:].tolist() == [[0, 0], [1, 42], [1, 42], [0, 42]]


def test_a_large_parameter_is_read_at_the_same_places_wherever_it_is_cut(monkeypatch):
    monkeypatch.setattr(parameters, "MOST_ELEMENTS", 40)
    whole = torch.arange(12.0 * 10).view(12, 10)  # every third column

    class Part(Shard):
        @property
        def global_shape(self):
            return (12, 10)

        @property
        def offsets(self):
            return self.at

        @property
        def local(self):
            return self.values

    def part(rows, columns):
        shard = Part("w", nn.Parameter(torch.zeros(1)), True, False)
        object.__setattr__(shard, "at", (rows.start, columns.start))
        object.__setattr__(shard, "values", whole[rows, columns])
        return set(Sample.of(shard).view(shard.local).flatten().tolist())

    alone = part(slice(0, 12), slice(0, 10))
    assert alone == {10.0 * row + column for row in range(12) for column in (0, 3, 6, 9)}
    by_rows = part(slice(0, 7), slice(0, 10)) | part(slice(7, 12), slice(0, 10))
    by_columns = part(slice(0, 12), slice(0, 5)) | part(slice(0, 12), slice(5, 10))
    assert by_rows == by_columns == alone


def test_what_runs_again_in_backward_changes_nothing():
    plain = configure(train={"precision": "fp64"})
    config = configure(train={"precision": "fp64"}, memory={"activation_checkpointing": "full"})
    assert worst_difference(run(0, 1, config), run(0, 1, plain)) == 0.0


def test_a_skipped_step_passes_its_turn_on(tmp_path):
    config = configure(
        train={"precision": "fp16", "steps": 6},
        amp={"grad_scaler": {"init_scale": 2.0**14}},
        monitor={"health_every": 3},
    )

    def overflow_in_step_3(trainer):
        count = iter(range(100))
        begin = trainer.train_step.probe.begin

        def begins(step):
            trainer.train_step.scaler.scale = 2.0**60 if next(count) == 2 else 2.0**14
            return begin(step)

        trainer.train_step.probe.begin = begins

    assert train(0, 1, config, tmp_path, overflow_in_step_3) == 0
    rows = lines(tmp_path, "metrics.jsonl")
    assert rows[2]["skipped"]
    assert [row["step"] for row in rows if "update_ratio_by_layer" in row] == [4, 6]
    norms = rows[5]["grad_norm_by_layer"].values()
    assert math.sqrt(sum(norm**2 for norm in norms)) == pytest.approx(
        rows[5]["grad_norm"], rel=1e-5
    )


def test_layers_add_up_to_the_global_norm_after_the_switch_of_1_bit_adam(ranks, tmp_path):
    config = configure(
        Layout(dp=2),
        train={"optimizer": "onebit_adam", "freeze_step": 2, "steps": 4, "warmup_steps": 1},
        monitor={"health_every": 1},
    )
    assert ranks.run(train, config, tmp_path, ranks=2) == [0, 0]
    rows = lines(tmp_path, "metrics.jsonl")
    assert len(rows) == 4
    for row in rows:
        total = math.sqrt(sum(norm**2 for norm in row["grad_norm_by_layer"].values()))
        assert total == pytest.approx(row["grad_norm"], rel=1e-5)
        assert all(0 < ratio < 1 for ratio in row["update_ratio_by_layer"].values())


def test_what_is_not_asked_for_is_not_looked_at(tmp_path):
    never, bare = tmp_path / "never", tmp_path / "bare"
    assert train(0, 1, configure(monitor={"health_every": 0}), never) == 0
    assert train(0, 1, configure(monitor={"activations": False}), bare) == 0
    for row in lines(never, "metrics.jsonl"):
        assert not any(name in row for name, field in FIELDS.items() if field.when == "sampled")
    sampled = [row for row in lines(bare, "metrics.jsonl") if "update_ratio_by_layer" in row]
    assert [row["step"] for row in sampled] == [2, 4]
    assert not any("activation" in name or "dead" in name for row in sampled for name in row)


def test_every_record_holds_fields_of_the_table(ranks, tmp_path):
    config = configure(Layout(dp=2), monitor={"step_memory": True, "peak_tflops": 0.5})
    assert ranks.run(train, config, tmp_path, ranks=2) == [0, 0]
    rows = lines(tmp_path, "metrics.jsonl")
    own = {"step", "tokens"}
    for row in rows:
        assert set(row) - own <= set(FIELDS)
        sampled = {name for name, field in FIELDS.items() if field.when == "sampled"}
        rare = {"step_memory_bytes_by_rank"}
        assert (set(row) & sampled) - rare == (set() if row["step"] % 2 else sampled - rare)
        for name in row.keys() - own:
            kind = FIELDS[name].kind
            assert isinstance(row[name], {"number": float, "ranks": list, "layers": dict}[kind])
        assert row["mfu"] == pytest.approx(row["model_tflops_per_rank"] / 0.5)
        assert all(0 < own_s < row["step_time_s"] for own_s in row["compute_s_by_rank"])
    assert [r["step"] for r in rows if "step_memory_bytes_by_rank" in r] == [2]


def test_keys_have_defaults_that_look():
    assert Config().monitor.health_every > 0
    assert Config().monitor.activations
