"""The embedding in fp32 for the first steps, then switched: by the step alone, to some effect."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from configs import config_of
from torch import nn

from mcp_parallel.config import Config, ParallelConfig
from mcp_parallel.layout import Layout
from mcp_parallel.model.embedding import Mixture, embed_mixed
from mcp_parallel.model.init import parameter_std
from mcp_parallel.parallel.mesh import build_mesh
from mcp_parallel.parallel.precision import Precision, fp32_share
from mcp_parallel.parallel.shards import publish
from mcp_parallel.snapshot import load_step, save_step
from mcp_parallel.step import TrainingStep

CPU = torch.device("cpu")
BATCH = 8


def test_the_share_of_fp32_is_a_line_between_all_and_nothing():
    train = config_of(train__fp32_embedding_steps=3, train__fp32_embedding_switch_steps=3).train
    shares = [fp32_share(step, train) for step in range(8)]
    assert shares == [1, 1, 1, 0.75, 0.5, 0.25, 0, 0]
    at_once = replace(train, fp32_embedding_switch_steps=0)
    assert [fp32_share(step, at_once) for step in range(5)] == [1, 1, 1, 0, 0]


def test_no_effect_at_full_precision_or_without_steps():
    for precision, steps, mixes in (("fp32", 5, False), ("bf16", 0, False), ("bf16", 5, True)):
        config = config_of(train__precision=precision, train__fp32_embedding_steps=steps)
        assert Precision.of(config).mixes_embedding == mixes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_mixture_is_the_weighted_sum_forward_and_backward(dtype):
    table = nn.Embedding(7, 12)
    tokens = torch.tensor([[0, 3, 3, 6]])
    upstream = torch.randn(1, 4, 12, generator=torch.Generator().manual_seed(0)).to(dtype)
    grads = {}
    for share in (1.0, 0.25, 0.0):
        table.weight.grad = None
        y = embed_mixed(table, tokens, Mixture(dtype, share))
        assert torch.equal(y, table.weight[tokens].to(dtype))  # the rounding of either is the same
        y.backward(upstream)
        grads[share] = table.weight.grad
    assert torch.equal(grads[0.0], grads[0.0].to(dtype).float())  # it was rounded to 16 bits
    rounded = grads[1.0].to(dtype).float()
    assert not torch.equal(grads[1.0], rounded)
    torch.testing.assert_close(grads[0.0], rounded, rtol=0, atol=0)

    # A quarter of the gradient stays fp32; three are rounded as they come and when they are summed.
    def summed(rows):
        return torch.zeros(7, 12).index_add_(0, tokens[0], rows[0])

    narrow = summed((0.75 * upstream.float()).to(dtype).float()).to(dtype).float()
    expected = summed(0.25 * upstream.float()) + narrow
    torch.testing.assert_close(grads[0.25], expected, rtol=2**-22, atol=2**-22)


def test_a_sum_that_overflows_fp16_does_not_overflow_in_fp32():
    table = nn.Embedding(3, 4)
    tokens = torch.ones(1, 1000, dtype=torch.int64)
    for share, is_finite in ((1.0, True), (0.5, False), (0.0, False)):
        table.weight.grad = None
        y = embed_mixed(table, tokens, Mixture(torch.float16, share))
        y.backward(torch.full_like(y, 200.0))
        assert table.weight.grad.isfinite().all() == is_finite
        if is_finite:
            assert table.weight.grad[1].tolist() == [200_000.0] * 4


# --- whole steps --------------------------------------------------------------------------------


def configure(layout, *, wide=(0, 0), tied=True, precision="bf16"):
    sizes = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 2}
    sizes |= {"preset": None, "ffn_size": 40, "vocab_size": 64, "seq_len": 16}
    base = Config.from_mapping({"model": {**sizes, "tie_embeddings": tied}})
    train = replace(
        base.train,
        global_batch_size=BATCH,
        micro_batch_size=BATCH // layout.dp // 2,
        warmup_steps=0,
        precision=precision,
        fp32_embedding_steps=wide[0],
        fp32_embedding_switch_steps=wide[1],
    )
    return replace(base, train=train, parallel=ParallelConfig(**asdict(layout)))


def batch(index, rows):
    generator = torch.Generator().manual_seed(index)
    tokens = torch.randint(64, (BATCH, 17), generator=generator)[rows.start : rows.stop]
    return tokens[:, :-1], tokens[:, 1:]


def run(rank, world, layout, options, start, stop, folder=None, save_at=None):
    """Steps ``start`` to ``stop``: figures of each, and the values that are left."""
    step = TrainingStep(configure(layout, **options), build_mesh(layout, CPU))
    if start:
        load_step(Path(folder) / "checkpoints" / f"step_{start:08d}", step)
    figures = []
    for index in range(start, stop):
        result = step(*batch(index, step.rows()), 1e-3, step=index)
        figures.append((result.loss, result.grad_norm))
        if index + 1 == save_at:
            save_step(Path(folder), save_at, step)
    return figures, [(s.name, s.local.clone()) for s in step.shards]


def switched_and_plain(tied):
    for wide in ((1, 1), (0, 0)):
        step = TrainingStep(configure(Layout(), tied=tied, wide=wide), build_mesh(Layout(), CPU))
        results = [step(*batch(i, step.rows()), 1e-3, step=2 + i) for i in range(3)]
        yield [(r.loss, r.grad_norm) for r in results], [s.local.clone() for s in step.shards]


def test_after_the_switch_a_step_is_that_of_a_plain_16_bit_run():
    (figures, values), (plain, kept) = switched_and_plain(tied=False)
    assert figures == plain
    assert all(torch.equal(a, b) for a, b in zip(values, kept, strict=True))


def test_after_the_switch_a_tied_table_has_one_rounding_less():
    """A plain run adds the gradients of table and head in 16 bits: half a unit of each element."""
    (figures, _), (plain, _) = switched_and_plain(tied=True)
    assert figures[0][0] == plain[0][0]
    assert figures[0][1] == pytest.approx(plain[0][1], rel=2**-9)


def test_the_loss_of_a_tied_head_is_the_mean_of_both_formats():
    losses = {}
    for name, options in {
        "wide": {"wide": (1, 0)},
        "mixed": {"wide": (0, 1)},
        "narrow": {},
    }.items():
        step = TrainingStep(configure(Layout(), **options), build_mesh(Layout(), CPU))
        with torch.no_grad():  # a head that says something: logits of a few units
            for shard in step.shards:
                if shard.name == "embed":
                    shard.local.mul_(20)
        publish(step.shards)
        losses[name] = step(*batch(0, step.rows()), 1e-3, step=0).loss
    assert losses["wide"] != losses["narrow"]
    halfway = (losses["wide"] + losses["narrow"]) / 2
    assert losses["mixed"] == pytest.approx(halfway, abs=2 * 2**-22 * halfway)


@pytest.mark.parametrize(
    "layout, tied",
    [(Layout(dp=2, zero=3), True), (Layout(tp=2), False), (Layout(dp=2, tp=2, zero=1), False)],
    ids=str,
)
def test_every_layout_mixes_alike(ranks, layout, tied):
    options = {"wide": (1, 2), "tied": tied}
    [(alone, _)] = ranks.run(run, Layout(), options, 0, 4, ranks=1)
    for figures, _ in ranks.run(run, layout, options, 0, 4, ranks=layout.world_size):
        torch.testing.assert_close(torch.tensor(figures), torch.tensor(alone), rtol=5e-3, atol=0)


def test_resume_in_the_middle_of_the_switch_is_exact(ranks, tmp_path):
    layout, options = Layout(dp=2, tp=2, zero=2), {"wide": (1, 3)}
    whole = ranks.run(run, layout, options, 0, 5, str(tmp_path), 2)
    rest = ranks.run(run, layout, options, 2, 5, str(tmp_path))
    for (figures, values), (again, resumed) in zip(whole, rest, strict=True):
        assert figures[2:] == again
        assert all(torch.equal(a, b) for (_, a), (_, b) in zip(values, resumed, strict=True))


# --- the other key of a gentle start ------------------------------------------------------------


def test_projections_onto_the_residual_stream_start_as_the_config_says():
    model = config_of(model__residual_init_scale=None).model
    for name in ("blocks.0.attn.wo", "blocks.3.ffn.w2"):
        assert parameter_std(name, model) == 0.02 / (2 * model.num_layers) ** 0.5
        assert parameter_std(name, replace(model, residual_init_scale=0.5)) == 0.01
        assert parameter_std(name, replace(model, residual_init_scale=0.0)) == 0.0
    for name in ("blocks.0.attn.wq", "embed"):
        assert parameter_std(name, replace(model, residual_init_scale=0.5)) == 0.02


def test_the_scale_of_initial_values_makes_no_other_model():
    scaled = config_of(model__residual_init_scale=0.5)
    assert scaled.fingerprint() == Config().fingerprint()
