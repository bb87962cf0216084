"""The vision transformer against its textbook formulas, and what stages must not change."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import cross_entropy

from mcp_parallel.config import Config
from mcp_parallel.layout import Layout, split_layers
from mcp_parallel.model.family import family_of
from mcp_parallel.model.init import fill_shard
from mcp_parallel.model.stage import stable_name
from mcp_parallel.model.vit import VitStage, parameter_std
from mcp_parallel.parallel.mesh import build_mesh
from mcp_parallel.parallel.parallelize import build_stages

RUN = Config.from_mapping(
    {
        "model": {
            "preset": None,
            "family": "vit",
            "num_layers": 3,
            "hidden_size": 18,
            "num_heads": 6,  # heads of 3 features: without rotations an odd size is a size
            "num_kv_heads": 2,
            "ffn_size": 20,
            "image_size": 9,
            "patch_size": 3,
            "channels": 2,
            "num_classes": 7,
        },
        "train": {"precision": "fp64"},
    }
)
CONFIG = RUN.model


def whole():
    model = build_stages(RUN, build_mesh(Layout(), torch.device("cpu")))[0].model
    # Initial values are small, biases zero and norms one: spread them.
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator, dtype=p.dtype) * 0.3)
    return model


def make_patches(count=4):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, CONFIG.seq_len, 3 * 3 * 2, generator=generator)


def textbook(model, patches):
    """Explicit loops over heads, softmax, GELU and LayerNorm by their definitions."""
    p = {stable_name(name): value for name, value in model.named_parameters()}
    size = CONFIG.hidden_size // CONFIG.num_heads
    group = CONFIG.num_heads // CONFIG.num_kv_heads

    def norm(x, name):
        centred = x - x.mean(-1, keepdim=True)
        scale = (centred.square().mean(-1, keepdim=True) + CONFIG.norm_eps).rsqrt()
        return centred * scale * p[f"{name}.weight"] + p[f"{name}.bias"]

    x = patches.double() @ p["patches"].T + p["patches.bias"] + p["patches.positions"]
    for layer in range(CONFIG.num_layers):
        at = f"blocks.{layer}"
        h = norm(x, f"{at}.attn_norm")
        q = h @ p[f"{at}.attn.wq"].T + p[f"{at}.attn.wq.bias"]
        k = h @ p[f"{at}.attn.wk"].T
        v = h @ p[f"{at}.attn.wv"].T + p[f"{at}.attn.wv.bias"]
        heads = []
        for head in range(CONFIG.num_heads):
            mine = slice(head * size, (head + 1) * size)
            its = slice(head // group * size, (head // group + 1) * size)
            scores = q[..., mine] @ k[..., its].transpose(1, 2) / math.sqrt(size)
            heads.append(scores.softmax(-1) @ v[..., its])
        x = x + torch.cat(heads, -1) @ p[f"{at}.attn.wo"].T + p[f"{at}.attn.wo.bias"]
        h = norm(x, f"{at}.ffn_norm") @ p[f"{at}.ffn.w1"].T + p[f"{at}.ffn.w1.bias"]
        h = h * 0.5 * (1 + torch.erf(h / math.sqrt(2)))
        x = x + h @ p[f"{at}.ffn.w2"].T + p[f"{at}.ffn.w2.bias"]
    return norm(x, "norm").mean(1) @ p["head"].T + p["head.bias"]


def test_logits_and_gradients_follow_the_formulas():
    model, patches = whole(), make_patches()
    targets = torch.tensor([0, 3, 6, 3])
    results = []
    for forward in (model, lambda x: textbook(model, x)):
        logits = forward(patches)
        loss = cross_entropy(logits, targets)
        results.append((logits, torch.autograd.grad(loss, list(model.parameters()))))
    (logits, grads), (expected, expected_grads) = results
    assert logits.shape == (4, 7)
    # Sums of a few dozen float64 products: 1e-12 is some thousand roundings.
    torch.testing.assert_close(logits, expected, rtol=1e-12, atol=1e-12)
    names = [name for name, _ in model.named_parameters()]
    for name, grad, want in zip(names, grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, want, rtol=1e-11, atol=1e-12, msg=name)
        # A parameter that nothing depends on would be moved by rounding alone (see wk's bias).
        assert grad.abs().max() > 1e-6, name


def test_every_patch_sees_every_other_and_knows_its_place():
    model, patches = whole(), make_patches(1)
    before = model(patches)
    for position in range(CONFIG.seq_len):
        changed = patches.clone()
        changed[:, position] += 1
        assert (model(changed) - before).abs().max() > 1e-6
    turned = model(patches.flip(1))
    assert (turned - before).abs().max() > 1e-6
    with torch.no_grad():
        model.patches.positions.zero_()
    # Without positions an image is a bag of patches; sums in another order differ by rounding.
    torch.testing.assert_close(model(patches.flip(1)), model(patches), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("num_stages", [2, 3])
def test_stages_in_a_row_are_the_whole(num_stages):
    model, patches = whole(), make_patches()
    values = dict(model.named_parameters())
    x, seen = patches, set()
    for index, layers in enumerate(split_layers(CONFIG.num_layers, num_stages)):
        stage = VitStage(
            CONFIG, layers, has_embedding=index == 0, has_head=index == num_stages - 1
        ).double()
        stage.load_state_dict({n: values[n] for n, _ in stage.named_parameters()})
        seen.update(n for n, _ in stage.named_parameters())
        x = stage(x)
    assert seen == set(values)
    assert torch.equal(x, model(patches))


@pytest.mark.parametrize("policy", ["selective", "full"])
def test_activation_checkpointing_changes_no_bit_and_keeps_less(policy):
    patches, targets, results = make_patches(), torch.tensor([0, 3, 6, 3]), []
    for chosen in ("none", policy):
        model, kept = whole(), []
        for block in model.blocks.values():
            block.remat.policy = chosen

        def pack(tensor, kept=kept):
            kept.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = cross_entropy(model(patches), targets)
        results.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
        results[-1].append(sum(kept))
    (*plain, all_kept), (*cheap, few_kept) = results
    assert all(torch.equal(a, b) for a, b in zip(plain, cheap, strict=True))
    if policy == "full":
        assert few_kept < 0.5 * all_kept


def test_shapes_told_to_the_pipeline_are_the_models():
    family, model = family_of(CONFIG), whole()
    inputs = torch.zeros(2, *family.input_shape(CONFIG, CONFIG.seq_len), dtype=family.input_dtype)
    assert model(inputs).shape == (2, *family.output_shape(CONFIG, CONFIG.seq_len))


@pytest.mark.parametrize(
    "name, expected",
    [
        ("patches", 1 / math.sqrt(3 * 3 * 2)),
        ("patches.bias", 0.0),
        ("patches.positions", 0.5),
        ("blocks.2.attn_norm.weight", None),
        ("blocks.2.attn_norm.bias", 0.0),
        ("blocks.2.attn.wq", 1 / math.sqrt(18)),
        ("blocks.2.attn.wo", 1 / math.sqrt(18) / math.sqrt(6)),
        ("blocks.2.attn.wo.bias", 0.0),
        ("blocks.2.ffn.w1", 1 / math.sqrt(18)),
        ("blocks.2.ffn.w2", 1 / math.sqrt(20) / math.sqrt(6)),
        ("head", 0.02),
    ],
)
def test_standard_deviations(name, expected):
    assert parameter_std(name, CONFIG) == expected


def test_zeros_are_zeros_without_a_sign():
    x = torch.full((5,), math.nan)
    fill_shard(x, "norm.bias", (5,), (0,), seed=0, std=0.0)
    assert torch.equal(x, torch.zeros(5))
    assert not torch.signbit(x).any()


def test_the_stream_keeps_its_size_through_the_blocks():
    """What the initial values are chosen for: no layer drowns the one before it."""
    run = Config.from_mapping(
        {"model": {"preset": "vit-digits", "num_layers": 12}, "train": {"precision": "fp64"}}
    )
    model = build_stages(run, build_mesh(Layout(), torch.device("cpu")))[0].model
    generator = torch.Generator().manual_seed(2)
    patches = torch.randn(16, 16, 4, generator=generator)
    with torch.no_grad():
        first = model.patches(patches)
        last = model.run_blocks(first)
    # Unit variance of content and a quarter of places go in. Each of 24 additions brings a 24th of
    # about a unit at most, so what comes out has grown, and by less than a factor of 2.
    assert 1.0 < first.square().mean() < 1.5
    assert first.square().mean() < last.square().mean() < 2 * first.square().mean()
