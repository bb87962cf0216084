"""The model against its textbook formulas, and what splitting it into stages must not change."""

import math
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import cross_entropy, silu

from mcp_parallel.config import Config, ModelConfig
from mcp_parallel.layout import Layout, split_layers
from mcp_parallel.model.llama import LlamaStage
from mcp_parallel.model.rotary import rotate
from mcp_parallel.model.stage import stable_name
from mcp_parallel.parallel.mesh import build_mesh
from mcp_parallel.parallel.parallelize import build_stages

CONFIG = ModelConfig(
    num_layers=3,
    hidden_size=24,
    num_heads=6,
    num_kv_heads=2,
    ffn_size=20,
    vocab_size=37,
    seq_len=11,
)


def whole(config=CONFIG, policy="none"):
    base = Config()
    run = replace(
        base,
        model=config,
        train=replace(base.train, precision="fp64"),
        memory=replace(base.memory, activation_checkpointing=policy),
    )
    model = build_stages(run, build_mesh(Layout(), torch.device("cpu")))[0].model
    # Initial values are small, which would hide a wrong softmax: spread them.
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator, dtype=p.dtype) * 0.3)
    return model


def textbook(model, tokens, config=CONFIG):
    """Complex-number rotations, explicit loops over heads, softmax by its definition."""
    p = {stable_name(name): value for name, value in model.named_parameters()}
    size = config.hidden_size // config.num_heads
    group = config.num_heads // config.num_kv_heads
    _batch, length = tokens.shape
    half = torch.arange(size // 2, dtype=torch.float64)
    angle = torch.outer(
        torch.arange(length, dtype=torch.float64), config.rope_theta ** (-2 * half / size)
    )
    turn = torch.polar(torch.ones_like(angle), angle)

    def norm(x, weight):
        return x / (x.square().mean(-1, keepdim=True) + config.norm_eps).sqrt() * weight

    def rope(x):
        z = torch.complex(x[..., : size // 2], x[..., size // 2 :]) * turn
        return torch.cat([z.real, z.imag], -1)

    hidden_future = torch.ones(length, length, dtype=torch.bool).triu(1)
    x = p["embed"][tokens]
    for layer in range(config.num_layers):
        w = {k.split(".", 2)[2]: v for k, v in p.items() if k.startswith(f"blocks.{layer}.")}
        h = norm(x, w["attn_norm.weight"])
        heads = []
        for head in range(config.num_heads):
            kv = head // group
            q = rope(h @ w["attn.wq"][head * size : (head + 1) * size].T)
            k = rope(h @ w["attn.wk"][kv * size : (kv + 1) * size].T)
            v = h @ w["attn.wv"][kv * size : (kv + 1) * size].T
            scores = q @ k.transpose(1, 2) / math.sqrt(size)
            heads.append(scores.masked_fill(hidden_future, -math.inf).softmax(-1) @ v)
        x = x + torch.cat(heads, -1) @ w["attn.wo"].T
        h = norm(x, w["ffn_norm.weight"])
        x = x + (silu(h @ w["ffn.w1"].T) * (h @ w["ffn.w3"].T)) @ w["ffn.w2"].T
    table = p["head"] if "head" in p else p["embed"]
    return norm(x, p["norm.weight"]) @ table.T


def make_tokens():
    generator = torch.Generator().manual_seed(0)
    return torch.randint(CONFIG.vocab_size, (2, CONFIG.seq_len), generator=generator)


@pytest.mark.parametrize("tied", [False, True])
def test_logits_and_gradients_follow_the_formulas(tied):
    config = replace(CONFIG, tie_embeddings=tied)
    model, tokens = whole(config), make_tokens()
    names = [n for n, _ in model.named_parameters()]
    assert ("head.weight" in names) != tied
    results = []
    for forward in (model, lambda t: textbook(model, t, config)):
        logits = forward(tokens)
        loss = cross_entropy(logits.flatten(0, 1), tokens.flatten())
        results.append((logits, torch.autograd.grad(loss, list(model.parameters()))))
    (logits, grads), (expected, expected_grads) = results
    # Sums of a few dozen float64 products: 1e-12 is some thousand roundings.
    torch.testing.assert_close(logits, expected, rtol=1e-12, atol=1e-12)
    for name, grad, want in zip(names, grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, want, rtol=1e-11, atol=1e-12, msg=name)


def test_no_token_sees_its_future():
    model, tokens = whole(), make_tokens()
    changed = tokens.clone()
    changed[:, 6] = (changed[:, 6] + 1) % CONFIG.vocab_size
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :6], after[:, :6])
    assert (before[:, 6:] != after[:, 6:]).any(-1).all()


@pytest.mark.parametrize("num_stages", [2, 3])
def test_stages_in_a_row_are_the_whole(num_stages):
    model, tokens = whole(), make_tokens()
    values = dict(model.named_parameters())
    x = tokens
    seen = set()
    for index, layers in enumerate(split_layers(CONFIG.num_layers, num_stages)):
        stage = LlamaStage(
            CONFIG, layers, has_embedding=index == 0, has_head=index == num_stages - 1
        ).double()
        stage.load_state_dict({n: values[n] for n, _ in stage.named_parameters()})
        seen.update(n for n, _ in stage.named_parameters())
        x = stage(x)
    assert seen == set(values)
    assert torch.equal(x, model(tokens))


@pytest.mark.parametrize("policy", ["selective", "full"])
def test_activation_checkpointing_changes_no_bit(policy):
    tokens = make_tokens()
    results = []
    for chosen in ("none", policy):
        model = whole(policy=chosen)
        loss = cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        results.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("policy", ["selective", "full"])
def test_activation_checkpointing_keeps_less(policy):
    def saved_bytes(chosen):
        model, kept = whole(policy=chosen), []

        def pack(tensor):
            kept.append(tensor.numel() * tensor.element_size())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            model(make_tokens())
        return sum(kept)

    assert saved_bytes(policy) < 0.7 * saved_bytes("none")


def test_rotation_keeps_lengths_and_depends_on_distance_alone():
    generator = torch.Generator().manual_seed(3)
    q, k = torch.randn(2, 1, 1, 1, 8, generator=generator, dtype=torch.float64)

    def turned(x, start):
        return rotate(x, x, 50.0, start)[0]

    def score(i, j):
        return (turned(q, i) * turned(k, j)).sum()

    torch.testing.assert_close(score(9, 4), score(105, 100), rtol=1e-12, atol=1e-13)
    assert (score(9, 4) - score(9, 5)).abs() > 1e-3
    torch.testing.assert_close(turned(q, 7).norm(), q.norm(), rtol=1e-14, atol=0)
