"""parallelize(model, plan, mesh): what it changes, what it refuses; Hugging Face models."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from mcp_kernels.nn import ColumnParallel, Replicated, RowParallel, llama_plan, parallelize
from mcp_kernels.nn.apply_plan import matches

transformers = pytest.importorskip("transformers")

VOCAB = 37  # odd: ranks hold 19 and 18 rows


def hf_model(kind, *, kv_heads=2, heads=4, tied=False, vocab=VOCAB):
    """Small, random, float64. Qwen3 has norms of single heads, StableLM keeps counts of heads."""
    sizes = {
        "vocab_size": vocab,
        "hidden_size": 16,
        "intermediate_size": 22,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 32,
        "tie_word_embeddings": tied,
        "attn_implementation": "sdpa",
        "pad_token_id": None,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    classes = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM, {}),
        "biased": (
            transformers.LlamaConfig,
            transformers.LlamaForCausalLM,
            {"attention_bias": True, "mlp_bias": True},
        ),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM, {"head_dim": 6}),
        "stablelm": (transformers.StableLmConfig, transformers.StableLmForCausalLM, {}),
    }
    config_class, model_class, more = classes[kind]
    torch.manual_seed(0)
    model = model_class(config_class(**sizes, **more)).double()
    with torch.no_grad():  # biases and norms that are not zeros and ones
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def tokens():
    return torch.randint(VOCAB, (2, 9), generator=torch.Generator().manual_seed(1))


def outcome(model):
    """Logits and gradients of one step, whole; the loss is ours, since transformers' is float32."""
    logits = model(input_ids=tokens()).logits
    nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens()[:, 1:].flatten()).backward()
    grads = {
        name: (p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad).clone()
        for name, p in model.named_parameters()
    }
    return logits.detach(), grads


def run_hf(rank, world, kind, options, plan_options, norm_limit):
    model = hf_model(kind, **options)
    report = parallelize(
        model, llama_plan(model, **plan_options), init_device_mesh("cpu", (world,))
    )
    logits, grads = outcome(model)
    assert all(isinstance(p, DTensor) for p in model.parameters())
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), norm_limit).full_tensor().item()
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    attention = model.model.layers[0].self_attn
    counts = {name: getattr(attention, name, None) for name in ("num_heads", "num_key_value_heads")}
    return logits, grads, norm, tied, counts, str(report)


HF_CASES = [
    ("llama", {}, {}, 2),
    ("llama", {}, {"embeddings": True, "head": True}, 2),
    ("llama", {"kv_heads": 4, "tied": True}, {"embeddings": True, "head": True}, 4),
    ("llama", {"tied": True}, {}, 2),
    ("biased", {}, {"head": True}, 2),
    ("qwen3", {}, {"embeddings": True}, 2),
    ("stablelm", {}, {}, 2),
]


@pytest.mark.parametrize("kind, options, plan_options, world", HF_CASES)
def test_hugging_face_models_are_equal_to_the_whole_ones(ranks, kind, options, plan_options, world):
    model = hf_model(kind, **options)
    logits, grads = outcome(model)
    whole_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
    for got_logits, got_grads, norm, tied, counts, report in ranks.run(
        run_hf, kind, options, plan_options, 1.0, ranks=world
    ):
        # Two layers of sums of up to 37 products in another order: a few hundred roundings.
        torch.testing.assert_close(got_logits, logits, rtol=0, atol=1e-12)
        assert got_grads.keys() == grads.keys()
        for name, grad in grads.items():
            torch.testing.assert_close(
                got_grads[name], grad, rtol=0, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}"
            )
        assert norm == pytest.approx(whole_norm, rel=1e-12)
        assert tied == options.get("tied", False)
        if kind == "stablelm":
            assert counts == {"num_heads": 2, "num_key_value_heads": 1}
            assert (
                "model.layers.1.self_attn: StableLmAttention by heads\n  num_heads 4 -> 2" in report
            )


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 6)
        self.act = nn.ReLU()
        self.down = nn.Linear(6, 4, bias=False)

    def forward(self, x):
        return self.down(self.act(self.up(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 5, bias=False)
        self.tied = nn.Linear(4, 5, bias=False)
        self.tied.weight = self.head.weight

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        x = self.norm(x)
        return self.head(x) * self.tied(x)


PLAN = {"blocks.*.up": ColumnParallel(), "blocks.*.down": RowParallel()}


def run_report(rank, world):
    mesh = init_device_mesh("cpu", (world,))
    model = Net()
    before = dict(model.named_modules())
    report = parallelize(model, PLAN, mesh.get_group())
    assert all(model.get_submodule(name) is module for name, module in before.items())
    assert model.tied.weight is model.head.weight
    left = Net()
    short = parallelize(left, PLAN, mesh, replicate_rest=False)
    assert not isinstance(left.norm.weight, DTensor)
    assert [change.module for change in short.changes] == [
        c.module for c in report.changes if c.module.startswith("blocks")
    ]
    x = torch.arange(8.0).view(2, 4).cos()
    with torch.device("meta"):
        late = Net()
    parallelize(late, PLAN, mesh)
    assert all(p.is_meta and isinstance(p, DTensor) for p in late.parameters())
    late.to_empty(device="cpu")
    late.load_state_dict(model.state_dict())
    assert torch.equal(late(x), model(x))
    twin = copy.deepcopy(model)
    assert torch.equal(twin(x), model(x))
    return str(report), report, model(x).detach()


def test_report_says_exactly_what_changed(ranks):
    x = torch.arange(8.0).view(2, 4).cos()
    for rank, (text, report, y) in enumerate(ranks.run(run_report)):
        # float32 sums of 6 products in three places.
        torch.testing.assert_close(y, Net()(x).detach(), rtol=0, atol=5e-6)
        names = [change.module for change in report.changes]
        changed = ["blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down"]
        assert names == [*changed, "norm", "head", "tied"]
        up = report.changes[0]
        assert (up.became, up.style) == (
            "ColumnParallelLinear",
            "ColumnParallel(sequence_parallel=False, gather_output=False, heads=None)",
        )
        rows = [2, 2, 2, 0][rank]
        found = [(p.name, p.shape, p.local_shape, p.layout) for p in up.parameters]
        assert found == [
            ("weight", (6, 4), (rows, 4), "S(0)"),
            ("bias", (6,), (rows,), "S(0)"),
        ]
        assert f"  weight [6, 4] S(0), here [{rows}, 4]" in text
        assert text.startswith("7 modules over 4 ranks\nblocks.0.up: ColumnParallelLinear by ")
        assert "norm: ReplicatedLayerNorm by Replicated(sums_gradients=False)" in text


def run_refusals(rank, world):
    mesh = init_device_mesh("cpu", (world,))
    raised = []
    parallel = Net()
    parallelize(parallel, PLAN, mesh)
    for model, plan in (
        (Net(), {"block.*.up": ColumnParallel(), **PLAN}),
        (Net(), {"blocks.0.*": ColumnParallel(), **PLAN}),
        (parallel, PLAN),
        (Net(), {"blocks.*.up": ColumnParallel(heads=3)}),
        (Net(), {"head": ColumnParallel()}),
    ):
        before = {name: (type(m), id(m)) for name, m in model.named_modules()}
        values = [id(p) for p in model.parameters()]
        with pytest.raises(ValueError, match="must") as caught:
            parallelize(model, plan, mesh)
        raised.append(str(caught.value))
        assert before == {name: (type(m), id(m)) for name, m in model.named_modules()}
        assert values == [id(p) for p in model.parameters()]
    model = hf_model("llama", kv_heads=1)
    with pytest.raises(ValueError, match="must") as caught:
        parallelize(model, llama_plan(model), mesh)
    raised.append(str(caught.value))
    with pytest.raises(ValueError, match="must") as caught:
        parallelize(hf_model("llama", tied=True), llama_plan(hf_model("llama"), head=True), mesh)
    raised.append(str(caught.value))
    return raised


def test_refused_plans_leave_the_model_alone(ranks):
    for raised in ranks.run(run_refusals, ranks=2):
        nothing, twice, again, heads, apart, kv_heads, tied = raised
        assert nothing == (
            "parallelize: pattern 'block.*.up' must match a module, got none; linear layers are "
            "called blocks.0.up, blocks.0.down, blocks.1.up, ..."
        )
        assert "blocks.0.up must be matched by one pattern, got ['blocks.0.*', " in twice
        assert "blocks.0.act: module must be nn.Linear itself, got ReLU" in twice
        assert "blocks.0.up: module must not be parallel yet, got ColumnParallelLinear" in again
        assert "norm: module must not be parallel yet, got ReplicatedLayerNorm" in again
        assert "blocks.1.up: heads must be divisible by 2 ranks, got 3; use one of [1, 3]" in heads
        assert "tied parameters must lie alike, got head.weight S(0), tied.weight R;" in apart
        assert kv_heads.startswith(
            "parallelize: model.layers.0.self_attn.k_proj: heads must be divisible by 2 ranks, "
            "got 1; use one of [1] ranks; model.layers.0.self_attn.v_proj: heads must be"
        )
        assert "cut both (RowParallel for the embedding, ColumnParallel for the head)" in tied


def test_llama_plan_refuses_what_it_does_not_know():
    with pytest.raises(ValueError, match=r"model must have modules with q_proj.*got Net"):
        llama_plan(Net())
    model = hf_model("llama")
    model.model.layers[0].self_attn.sinks = nn.Parameter(torch.zeros(4))
    with pytest.raises(ValueError, match=r"layers.0.self_attn must hold .* got sinks \[4\]"):
        llama_plan(model)
    assert isinstance(llama_plan(hf_model("qwen3"))["model.layers.1.self_attn.k_norm"], Replicated)


def test_parallelize_needs_ranks():
    with pytest.raises(ValueError, match="call init_process_group first"):
        parallelize(Net(), PLAN)


def test_patterns_match_part_by_part():
    assert matches("a.*.c", "a.1.c")
    assert not matches("a.*", "a.1.c")
    assert not matches("*", "a.b")
    assert matches("layers.*.[qkv]_proj", "layers.10.k_proj")
    assert not matches("layers.*.[qkv]_proj", "layers.10.o_proj")
    assert matches("", "")
