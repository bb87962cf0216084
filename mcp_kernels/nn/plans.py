"""A ready plan for Llama-type models of Hugging Face: Llama, Mistral, Qwen, Gemma, StableLM, ...

Found by the names that they share: ``q_proj k_proj v_proj o_proj`` beside each other are an
attention, ``gate_proj up_proj down_proj`` a feed-forward. Nothing of transformers is imported.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from mcp_kernels.nn.parallel_style import (
    ColumnParallel,
    Replicated,
    RowParallel,
    TensorParallelStyle,
)

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")


def llama_plan(
    model: nn.Module, *, embeddings: bool = False, head: bool = False
) -> dict[str, TensorParallelStyle]:
    """Styles for every attention and feed-forward of ``model``, for ``parallelize``.

    q, k, v, gate and up are cut by output features, o and down by input features, attention by
    whole heads. Norms of single heads sum their gradients over the ranks. Logits stay whole.

    Args:
        model: a model with ``config.num_attention_heads`` and ``num_key_value_heads``.
        embeddings: cut the rows of the input table too. With tied embeddings, together with
            ``head``.
        head: cut the vocabulary of the output layer too.

    Raises:
        ValueError: there is nothing that looks like Llama, or an attention holds parameters that
            this plan does not know.
    """
    config: Any = getattr(model, "config", None)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    heads = getattr(config, "num_attention_heads", None)
    kv_heads = getattr(config, "num_key_value_heads", heads)
    plan: dict[str, TensorParallelStyle] = {}
    for name, module in model.named_modules():
        children = dict(module.named_children())
        if all(child in children for child in ATTENTION):
            plan.update(_attention(name, module, heads, kv_heads))
        elif all(child in children for child in FEED_FORWARD):
            column, row = ColumnParallel(), RowParallel()
            styles = zip(FEED_FORWARD, (column, column, row), strict=True)
            plan.update({f"{name}.{child}": style for child, style in styles})
    if not plan:
        raise ValueError(
            f"llama_plan: model must have modules with {', '.join(ATTENTION)} or "
            f"{', '.join(FEED_FORWARD)}, got {type(model).__name__}; write its plan by hand"
        )
    if embeddings:
        plan[_name_of(model, "get_input_embeddings")] = RowParallel()
    if head:
        plan[_name_of(model, "get_output_embeddings")] = ColumnParallel(gather_output=True)
    return plan


def _attention(
    name: str, module: nn.Module, heads: int | None, kv_heads: int | None
) -> Iterator[tuple[str, TensorParallelStyle]]:
    if heads is None or kv_heads is None:
        raise ValueError(
            "llama_plan: model.config must have num_attention_heads, got none; write the plan by "
            "hand, with heads= in each style"
        )
    q_proj = module.get_submodule("q_proj")
    assert isinstance(q_proj, nn.Linear)
    head_size = q_proj.out_features // heads
    yield f"{name}.q_proj", ColumnParallel(heads=heads)
    yield f"{name}.k_proj", ColumnParallel(heads=kv_heads)
    yield f"{name}.v_proj", ColumnParallel(heads=kv_heads)
    yield f"{name}.o_proj", RowParallel(heads=heads)
    for child, parameter in module.named_parameters():
        owner = child.rpartition(".")[0]
        if owner in ATTENTION:
            continue
        if not owner or tuple(parameter.shape) != (head_size,):
            raise ValueError(
                f"llama_plan: {name} must hold its projections and norms of one head ({head_size} "
                f"features), got {child} {list(parameter.shape)}; write the plan by hand"
            )
        # Applied to this rank's heads alone, so that each rank finds a part of its gradient.
        yield f"{name}.{owner}", Replicated(sums_gradients=True)


def _name_of(model: nn.Module, getter: str) -> str:
    wanted = getattr(model, getter, lambda: None)()
    for name, module in model.named_modules():
        if module is wanted:
            return name
    raise ValueError(f"llama_plan: model.{getter}() must give a module of the model, got {wanted}")
