"""``parallelize(model, plan, mesh)``: tensor parallelism for a whole model, stated and reported.

    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    report = parallelize(model, {"*.up": ColumnParallel(), "*.down": RowParallel()}, mesh)
    print(report)

Nothing is patched: modules that the plan names become the layers of this package, in place, all
others only hold their parameters as replicated DTensors, and the report lists every change. The
whole plan is checked first, so a plan that is refused leaves the model as it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from mcp_kernels.nn.parallel_style import (
    ColumnParallel,
    Replicated,
    RowParallel,
    TensorParallelStyle,
)
from mcp_kernels.nn.sharding import Group, as_mesh, describe, to_local

Plan = Mapping[str, TensorParallelStyle]
"""Pattern of module names -> style. A pattern has as many dots as the name it matches; each part
is matched as by ``fnmatch``: ``model.layers.*.self_attn.[qkv]_proj``."""

# Attributes in which modules of Hugging Face and others keep a number of heads to reshape by.
HEAD_COUNTS = ("num_heads", "num_attention_heads", "num_key_value_heads", "num_kv_heads")


@dataclass(frozen=True)
class ParameterChange:
    """One parameter of a changed module."""

    name: str
    shape: tuple[int, ...]
    """Of the whole parameter."""
    local_shape: tuple[int, ...]
    """Of what this rank holds."""
    layout: str
    """"replicated", or which dim is cut: "S(0)"."""


@dataclass(frozen=True)
class Change:
    """One module that ``parallelize`` changed."""

    module: str
    style: str
    """The style as the plan gave it."""
    became: str
    """The module's class now."""
    parameters: tuple[ParameterChange, ...]
    attributes: dict[str, tuple[int, int]]
    """Numbers that were made this rank's own: name -> (before, now)."""


@dataclass(frozen=True)
class ParallelizeReport:
    """Everything that ``parallelize`` changed, in the model's order."""

    ranks: int
    changes: tuple[Change, ...]

    def __str__(self) -> str:
        lines = [f"{len(self.changes)} modules over {self.ranks} ranks"]
        for change in self.changes:
            lines.append(f"{change.module or '(model)'}: {change.became} by {change.style}")
            lines += [
                f"  {p.name} {list(p.shape)} {p.layout}, here {list(p.local_shape)}"
                for p in change.parameters
            ]
            lines += [f"  {k} {was} -> {now}" for k, (was, now) in change.attributes.items()]
        return "\n".join(lines)


def parallelize(
    model: nn.Module,
    plan: Plan,
    mesh: Group = None,
    *,
    replicate_rest: bool = True,
    src_data_rank: int | None = 0,
) -> ParallelizeReport:
    """Lay ``model`` over the ranks of ``mesh`` by ``plan``, in place. Collective.

    Args:
        model: whole on every rank, or on the meta device; before ``fully_shard``.
        plan: pattern of module names -> ``ColumnParallel``, ``RowParallel`` or ``Replicated``;
            ``llama_plan`` makes one.
        mesh: 1-D mesh or process group; a slice of a larger mesh where ``fully_shard`` follows.
        replicate_rest: make all other parameters replicated DTensors, which ``clip_grad_norm_``
            and foreach optimizers need beside the ones that are cut. False leaves them plain: for
            modules that read the parameters of their children.
        src_data_rank: rank of the mesh whose values count; None takes each rank's own, without
            communication.

    Returns:
        What was changed: modules, styles, shapes, attributes.

    Raises:
        ValueError: a pattern matches nothing or a module is matched twice, a module is parallel
            already or cannot take its style, heads are not divisible, tied parameters would part.
            The model is then untouched.
    """
    device_mesh = as_mesh("parallelize", mesh, _device_type(model))
    if device_mesh is None:
        raise ValueError(
            "parallelize: mesh must be given where torch.distributed is not set up, got None; "
            "call init_process_group first"
        )
    chosen = _resolve(model, plan, device_mesh.size(), replicate_rest=replicate_rest)
    sites = _tied_sites(model)
    _check_ties(model, sites, chosen)
    for name, style in chosen.items():
        style.src_data_rank = src_data_rank
        style.convert(model.get_submodule(name), device_mesh)
    for first, *others in sites:
        tied = model.get_submodule(first[0])._parameters[first[1]]
        for owner, leaf in others:
            model.get_submodule(owner).register_parameter(leaf, tied)
    changes = [_change(name, model.get_submodule(name), style) for name, style in chosen.items()]
    changes += _share_heads(model, chosen, device_mesh.size())
    return ParallelizeReport(device_mesh.size(), tuple(changes))


def matches(pattern: str, name: str) -> bool:
    """Whether ``pattern`` names module ``name``, part by part."""
    parts, words = pattern.split("."), name.split(".")
    return len(parts) == len(words) and all(map(fnmatchcase, words, parts))


def _device_type(model: nn.Module) -> str | None:
    kinds = {p.device.type for p in model.parameters()} - {"meta"}
    return kinds.pop() if len(kinds) == 1 else None


def _resolve(
    model: nn.Module, plan: Plan, ranks: int, *, replicate_rest: bool
) -> dict[str, TensorParallelStyle]:
    """Style of every module that will change, in the model's order; raises all problems at once."""
    found: dict[str, list[str]] = {}
    problems = []
    for pattern in plan:
        names = [name for name, _ in model.named_modules() if matches(pattern, name)]
        if not names:
            problems.append(f"pattern {pattern!r} must match a module, got none{_near(model)}")
        for name in names:
            found.setdefault(name, []).append(pattern)
    chosen: dict[str, TensorParallelStyle] = {}
    for name, module in model.named_modules():
        patterns = found.get(name, [])
        if len(patterns) > 1:
            problems.append(f"{name} must be matched by one pattern, got {patterns}")
        elif patterns:
            chosen[name] = plan[patterns[0]]
        elif replicate_rest and any(p is not None for p in module._parameters.values()):
            chosen[name] = Replicated()
    for name, style in chosen.items():
        problem = style.problem(model.get_submodule(name), ranks)
        if problem is not None:
            problems.append(f"{name or '(model)'}: {problem}")
    if problems:
        raise ValueError("parallelize: " + "; ".join(problems))
    return chosen


def _near(model: nn.Module) -> str:
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    return f"; linear layers are called {', '.join(names[:3])}, ..." if names else ""


Site = tuple[str, str]  # module, parameter in it


def _tied_sites(model: nn.Module) -> list[list[Site]]:
    """Places that hold the same parameter, where there is more than one."""
    sites: dict[int, list[Site]] = {}
    for name, module in model.named_modules():
        for leaf, parameter in module._parameters.items():
            if parameter is not None:
                sites.setdefault(id(parameter), []).append((name, leaf))
    return [places for places in sites.values() if len(places) > 1]


def _check_ties(
    model: nn.Module, sites: list[list[Site]], chosen: Mapping[str, TensorParallelStyle]
) -> None:
    for places in sites:
        layouts: dict[str, str] = {}
        for owner, leaf in places:
            module, style = model.get_submodule(owner), chosen.get(owner)
            laid = "whole" if style is None else str(style.placements(module)[leaf])
            layouts[f"{owner}.{leaf}"] = laid
        if len(set(layouts.values())) > 1:
            told = ", ".join(f"{name} {layout}" for name, layout in layouts.items())
            raise ValueError(
                f"parallelize: tied parameters must lie alike, got {told}; cut both "
                "(RowParallel for the embedding, ColumnParallel for the head) or neither"
            )


def _share_heads(
    model: nn.Module, chosen: Mapping[str, TensorParallelStyle], ranks: int
) -> Iterator[Change]:
    """Divide head counts that a module keeps, where its projections are cut by heads."""
    owners = {
        name.rpartition(".")[0]
        for name, style in chosen.items()
        if isinstance(style, ColumnParallel | RowParallel) and style.heads is not None
    }
    for owner in sorted(owners):
        module = model.get_submodule(owner)
        shared: dict[str, tuple[int, int]] = {}
        for name in HEAD_COUNTS:
            count = module.__dict__.get(name)
            if isinstance(count, int):
                shared[name] = (count, count // ranks)
                setattr(module, name, count // ranks)
        if shared:
            yield Change(owner, "heads", type(module).__name__, (), shared)


def _change(name: str, module: nn.Module, style: TensorParallelStyle) -> Change:
    parameters = tuple(
        ParameterChange(
            leaf, tuple(p.shape), tuple(to_local(p.detach()).shape), describe(p.detach())
        )
        for leaf, p in module._parameters.items()
        if p is not None
    )
    return Change(name, repr(style), type(module).__name__, parameters, {})
