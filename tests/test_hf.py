"""Hugging Face models with ``attn_implementation="mcp_attention"``: equal to eager attention."""

from __future__ import annotations

import copy
import inspect
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

import transformers
from transformers.masking_utils import causal_mask_function, chunked_causal_mask_function

import mcp_kernels.hf

VOCABULARY, LENGTH = 61, 21
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.fixture(scope="module", autouse=True)
def registered() -> None:
    mcp_kernels.hf.register()


def _pair(kind: str, *, head: str = "ForCausalLM", **sizes: Any) -> tuple[Any, Any]:
    """(model on eager attention, the same on ours), float32, in evaluation."""
    torch.manual_seed(0)
    # A text model of a family of several kinds has a configuration of its own.
    text = f"{kind}TextConfig"
    name = text if hasattr(transformers, text) else f"{kind}Config"
    config = getattr(transformers, name)(**{**SIZES, **sizes})
    config._attn_implementation = "eager"
    eager = getattr(transformers, f"{kind}{head}")(config).eval()
    own_config = copy.deepcopy(config)
    own_config._attn_implementation = mcp_kernels.hf.NAME
    own = getattr(transformers, f"{kind}{head}")(own_config).eval()
    own.load_state_dict(eager.state_dict())
    return eager, own


def _tokens(batch: int = 2, length: int = LENGTH) -> Tensor:
    return torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(1))


def _padding(side: str) -> Tensor:
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    if side == "left":
        mask[0, :7] = 0
    if side == "right":
        mask[1, -5:] = 0
    return mask


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama_gqa": ("Llama", {}),
    "llama_mqa": ("Llama", {"num_key_value_heads": 1}),
    "mistral_window": ("Mistral", {"sliding_window": 5}),
    "gemma2_softcap_window": ("Gemma2", {"sliding_window": 6, "query_pre_attn_scalar": 8}),
    "gpt_oss_sinks": (
        "GptOss",
        {"sliding_window": 6, "num_local_experts": 2, "num_experts_per_tok": 1},
    ),
    "llama4_chunks": (
        "Llama4",
        {
            "attention_chunk_size": 5,
            "num_hidden_layers": 4,  # three of chunks, one of all keys
            "intermediate_size_mlp": 64,
            "num_local_experts": 2,
        },
    ),
}


# Two layers in float32 on both sides: some hundred roundoffs of 6e-8 on logits of size 1, more on
# gradients, which are sums over all tokens. (In float64 eager attention gives NaN on padding.)
LOGITS_BOUND = 2e-5
GRADIENT_BOUND = 1e-4


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients_equal_eager(name: str, side: str) -> None:
    kind, sizes = MODELS[name]
    eager, own = _pair(kind, **sizes)
    tokens, mask = _tokens(), _padding(side)
    results = []
    for model in (eager, own):
        logits = model(tokens, attention_mask=mask).logits
        is_token = mask.bool()
        targets = torch.roll(tokens, -1, 1)[is_token]
        loss = torch.nn.functional.cross_entropy(logits[is_token], targets)
        loss.backward()
        results.append((logits.detach()[is_token], loss.detach()))
    (expected, expected_loss), (actual, loss) = results
    torch.testing.assert_close(actual, expected, rtol=0, atol=LOGITS_BOUND)
    torch.testing.assert_close(loss, expected_loss, rtol=0, atol=LOGITS_BOUND)
    for (where, wanted), got in zip(eager.named_parameters(), own.parameters(), strict=True):
        if wanted.grad is None:
            assert got.grad is None, where
            continue
        error = float((got.grad - wanted.grad).norm())
        assert error <= GRADIENT_BOUND * max(float(wanted.grad.norm()), 1e-3), where


@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("name", ["llama_gqa", "mistral_window", "gpt_oss_sinks", "llama4_chunks"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation_equals_eager(name: str, side: str, cache: str) -> None:
    """Greedy generation through the model's cache, past the sliding window."""
    kind, sizes = MODELS[name]
    eager, own = _pair(kind, **sizes)
    tokens, mask = _tokens(), _padding(side)
    expected, actual = (
        model.generate(
            tokens,
            attention_mask=mask,
            max_new_tokens=12,
            min_new_tokens=12,
            do_sample=False,
            cache_implementation=None if cache == "dynamic" else cache,
            disable_compile=True,
        )
        for model in (eager, own)
    )
    assert torch.equal(actual, expected)


BIDIRECTIONAL: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", {}),
    # Every second layer sees 4 tokens on either side.
    "modernbert_windows": ("ModernBert", {"local_attention": 8, "global_attn_every_n_layers": 2}),
}


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("name", BIDIRECTIONAL)
def test_bidirectional_models_equal_eager(name: str, side: str) -> None:
    """Every token sees those before and those behind it, and no padding."""
    kind, sizes = BIDIRECTIONAL[name]
    eager, own = _pair(kind, head="Model", **sizes, cls_token_id=1, sep_token_id=2)
    tokens, mask = _tokens(), _padding(side)
    is_token, results = mask.bool(), []
    for model in (eager, own):
        states = model(tokens, attention_mask=mask).last_hidden_state
        weights = torch.randn(states.shape, generator=torch.Generator().manual_seed(2))
        (states * weights)[is_token].sum().backward()
        results.append(states.detach()[is_token])
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=LOGITS_BOUND)
    changed = tokens.clone()
    changed[:, 12] = 3 + (tokens[:, 12] - 2) % (VOCABULARY - 3)
    other = own(changed, attention_mask=mask).last_hidden_state.detach()
    assert (other != own(tokens, attention_mask=mask).last_hidden_state)[:, 10].any()
    for (where, wanted), got in zip(eager.named_parameters(), own.parameters(), strict=True):
        if wanted.grad is None:
            assert got.grad is None, where
            continue
        error = float((got.grad - wanted.grad).norm())
        # Weighed sums of 30 states, not a mean: some ten times the gradients of a loss of size 1.
        assert error <= GRADIENT_BOUND * max(float(wanted.grad.norm()), 1.0), where


def test_prompt_in_pieces_equals_one_pass() -> None:
    """Rows in the middle of the cache: causal from the end, not from the start."""
    _, own = _pair("Llama")
    tokens = _tokens()
    whole = own(tokens).logits
    first = own(tokens[:, :8], use_cache=True)
    # transformers 5 renames the argument and keeps the field.
    name = "cache" if "cache" in inspect.signature(own.model.forward).parameters else None
    second = own(tokens[:, 8:], **{name or "past_key_values": first.past_key_values})
    torch.testing.assert_close(second.logits, whole[:, 8:], rtol=0, atol=LOGITS_BOUND)


def test_packed_sequences_do_not_see_each_other() -> None:
    eager, own = _pair("Llama")
    tokens = _tokens(1)
    positions = torch.cat([torch.arange(9), torch.arange(LENGTH - 9)])[None]
    expected, actual = (
        model(tokens, position_ids=positions, use_cache=False).logits for model in (eager, own)
    )
    torch.testing.assert_close(actual, expected, rtol=0, atol=LOGITS_BOUND)
    apart = own(tokens[:, 9:], use_cache=False).logits
    torch.testing.assert_close(actual[:, 9:], apart, rtol=0, atol=LOGITS_BOUND)


def test_masks_stay_small_where_they_can() -> None:
    """No [Sq, Sk] matrix for causal and windowed layers, padded or not."""
    config = transformers.MistralConfig(**SIZES, sliding_window=5)
    kwargs: dict[str, Any] = {"batch_size": 2, "q_length": 8, "kv_length": 8, "config": config}
    padded = torch.ones(2, 8, dtype=torch.bool)
    make = mcp_kernels.hf.attention_mask
    assert make(**kwargs) is None
    assert make(**kwargs, local_size=5) is None
    assert make(**kwargs, attention_mask=padded) is None
    padded[0, :3] = False
    mask = make(**kwargs, attention_mask=padded, local_size=5)
    assert mask is not None
    assert torch.equal(mask, padded)
    # Chunks, and keys that go on behind the last row, are more than a layer's arguments say.
    config.attention_chunk_size = 4
    chunks = make(
        **kwargs, local_size=4, mask_function=chunked_causal_mask_function(4, torch.zeros(2))
    )
    assert chunks is not None
    assert not chunks[0, 0, 4, 3]
    assert chunks[0, 0, 3, 0]
    static = make(**{**kwargs, "kv_length": 12}, mask_function=causal_mask_function)
    assert static is not None
    assert static[0, 0].sum(1).tolist() == list(range(1, 9))


def test_weights_are_refused_in_words() -> None:
    x = torch.zeros(1, 2, 3, 4)
    with pytest.raises(ValueError, match="output_attentions must be False, got True"):
        mcp_kernels.hf.attention(torch.nn.Module(), x, x, x, None, output_attentions=True)


def test_without_transformers_the_way_out_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"pip install 'mcp-kernels\[hf\]'"):
        mcp_kernels.hf.register()
