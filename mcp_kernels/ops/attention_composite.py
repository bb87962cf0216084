"""Attention in differentiable torch operations: for second gradients and for the probabilities.

The same formulas as ``attention_reference.py``, with the whole score matrix in memory and autograd
left to torch. It is what the backward of the backward runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mcp_kernels.ops.attention_mask import alibi_distance, dropout_keep, visible_mask
from mcp_kernels.ops.attention_scores import AttentionInputs


def attention_composite(inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
    """(out ``[B, Sq, H, E]``, lse ``[B, H, Sq]``), differentiable as often as one likes.

    Cost: O(B H Sq Sk) memory.
    """
    s = _scores(inputs)
    # Any finite shift gives the same result. logsumexp would do, were its second gradient not NaN
    # on a row that sees no key.
    shift = s.detach().amax(-1) if s.shape[-1] else s.new_zeros(s.shape[:-1])
    sink = None if inputs.sink is None else inputs.sink.to(s.dtype)[None, :, None]
    if sink is not None:
        shift = torch.maximum(shift, sink.detach())
    shift = shift.masked_fill(shift == -math.inf, 0.0)
    exponentials = torch.exp(s - shift[..., None])
    total = exponentials.sum(-1)
    if sink is not None:
        total = total + torch.exp(sink - shift)
    is_dead = total == 0
    total = total.masked_fill(is_dead, 1.0)
    lse = (shift + total.log()).masked_fill(is_dead, -math.inf)
    p = exponentials / total[..., None]
    if inputs.rng is not None:
        dropout_p = inputs.options.dropout_p
        p = p * _keep(inputs).to(p.dtype) * (1 / (1 - dropout_p) if dropout_p < 1 else 0.0)
    group = s.shape[1] // max(1, inputs.v.shape[2])
    v = inputs.v.to(s.dtype).repeat_interleave(group, dim=2)
    out = torch.einsum("bhij,bjhe->bihe", p, v)
    return out.to(inputs.q.dtype), lse


def second_gradients(
    composite: Callable[..., tuple[Tensor, Tensor]],
    leaves: Sequence[Tensor | None],
    dout: Tensor,
    dlse: Tensor | None,
    is_wanted: Sequence[bool],
    grads: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """Gradients of attention's backward, by recomputing it with operations that autograd knows.

    The results of forward get none: they are functions of the leaves, and all that the leaves do
    through them is in the recomputation.

    Args:
        composite: ``composite(*leaves) -> (out, lse)``, differentiable.
        leaves: q, k, v and what else has a gradient.
        dout: gradient of ``out`` that backward was given.
        dlse: gradient of ``lse`` that backward was given.
        is_wanted: for each leaf, whether backward returned its gradient.
        grads: gradients of what backward returned, in the order of the leaves.

    Returns:
        Gradients of (dout, dlse, *leaves), None where there is none.
    """
    if torch._C._are_functorch_transforms_active():
        return _by_transforms(composite, leaves, dout, dlse, is_wanted, grads)
    with torch.enable_grad():
        # Fresh handles: leaves may be one tensor, and each place has a gradient of its own.
        leaves = [None if t is None else _handle(t) for t in leaves]
        dout, dlse = _handle(dout), None if dlse is None else _handle(dlse)
        wanted = [t if is_it else None for t, is_it in zip(leaves, is_wanted, strict=True)]
        first = _grad(composite(*leaves), wanted, (dout, dlse))
        return _grad(first, [dout, dlse, *leaves], grads)


def _by_transforms(
    composite: Callable[..., tuple[Tensor, Tensor]],
    leaves: Sequence[Tensor | None],
    dout: Tensor,
    dlse: Tensor | None,
    is_wanted: Sequence[bool],
    grads: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """``second_gradients`` inside torch.func, where no tensor may be made to require a gradient."""
    given = [dout, dlse, *leaves]
    at = [i for i, t in enumerate(given) if t is not None and t.is_floating_point()]
    asked = [i for i in at if i >= 2 and is_wanted[i - 2] and grads[i - 2] is not None]
    if not asked:
        return [None] * len(given)

    def first(*variables: Tensor) -> tuple[Tensor, ...]:
        own = dict(enumerate(given)) | dict(zip(at, variables, strict=True))

        def forward(*wanted: Tensor) -> tuple[Tensor, ...]:
            inner = own | dict(zip(asked, wanted, strict=True))
            out, lse = composite(*(inner[i] for i in range(2, len(given))))
            return (out,) if dlse is None else (out, lse)

        pull = torch.func.vjp(forward, *(own[i] for i in asked))[1]
        return pull((own[0],) if dlse is None else (own[0], own[1]))

    pull = torch.func.vjp(first, *(given[i] for i in at))[1]
    found = pull(tuple(grads[i - 2] for i in asked))
    by_place = dict(zip(at, found, strict=True))
    return [by_place.get(i) for i in range(len(given))]


def attention_probabilities(inputs: AttentionInputs, lse: Tensor) -> Tensor:
    """``[B, H, Sq, Sk]`` probabilities before dropout, negative where dropout drops.

    Cost: O(B H Sq Sk) memory.
    """
    p = torch.exp(_scores(inputs) - lse.masked_fill(lse == -math.inf, math.inf)[..., None])
    if inputs.rng is not None:
        p = torch.where(_keep(inputs), p, -p)
    return p.to(inputs.q.dtype)


def _handle(tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    return tensor.view_as(tensor) if tensor.requires_grad else tensor.detach().requires_grad_()


def _grad(
    outputs: Sequence[Tensor | None],
    inputs: Sequence[Tensor | None],
    grads: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """torch.autograd.grad that keeps the graph and passes over what is None on either side."""
    pairs = [
        (output, grad)
        for output, grad in zip(outputs, grads, strict=True)
        if output is not None and grad is not None and output.requires_grad
    ]
    given = [t for t in inputs if t is not None and t.requires_grad]
    if not pairs or not given:
        return [None] * len(inputs)
    found = torch.autograd.grad(
        [output for output, _ in pairs],
        given,
        [grad for _, grad in pairs],
        create_graph=True,
        allow_unused=True,
    )
    by_id = {id(t): grad for t, grad in zip(given, found, strict=True)}
    return [None if t is None else by_id.get(id(t)) for t in inputs]


def _scores(inputs: AttentionInputs) -> Tensor:
    """``[B, H, Sq, Sk]`` scores with everything but the sink, -inf where hidden."""
    options = inputs.options
    num_rows, num_keys = inputs.q.shape[1], inputs.k.shape[1]
    dtype, device = inputs.compute_dtype, inputs.q.device
    group = inputs.q.shape[2] // max(1, inputs.k.shape[2])
    k = inputs.k.to(dtype).repeat_interleave(group, dim=2)
    s = torch.einsum("bihd,bjhd->bhij", inputs.q.to(dtype), k) * options.softmax_scale
    if options.softcap > 0:
        s = options.softcap * torch.tanh(s / options.softcap)
    if inputs.bias is not None:
        if inputs.bias.dtype == torch.bool:
            s = s.masked_fill(~inputs.bias, -math.inf)
        else:
            s = s + inputs.bias.to(dtype)
    if inputs.alibi_slopes is not None:
        rows, keys = (torch.arange(n, device=device) for n in (num_rows, num_keys))
        distance = alibi_distance(rows, keys, options.offset(num_rows, num_keys)).to(dtype)
        s = s - inputs.alibi_slopes.to(dtype)[:, :, None, None] * distance
    if options.is_windowed:
        visible = visible_mask(options, num_rows, num_keys, device)
        s = s.masked_fill(~visible, -math.inf)
    return s


def _keep(inputs: AttentionInputs) -> Tensor:
    batch, num_rows, heads, _ = inputs.q.shape
    positions = (
        torch.arange(n, device=inputs.q.device) for n in (batch, heads, num_rows, inputs.k.shape[1])
    )
    batches, *others = positions
    assert inputs.rng is not None
    return dropout_keep(inputs.rng, inputs.options.dropout_p, batches + inputs.first_batch, *others)
