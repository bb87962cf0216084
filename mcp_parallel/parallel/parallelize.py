"""The one place that says in which order parallelism is applied to a model.

1. pipeline: build only the blocks of this rank's stages, without memory (meta device);
2. tensor: each layer becomes this rank's part of it, still without memory; layers that stay whole
   learn to put their weight gradients off where the schedule does;
3. context: attention becomes one over the sequence that cp ranks share;
4. what each block keeps for backward: checkpointing and compression;
5. values: block by block, so that no more than one block is ever whole on a rank; in 16 bits
   without ``fully_shard`` each parameter becomes a rounded copy of them (``precision.py``);
6. data: ``fully_shard`` around each block, then around the stage (ZeRO 1 to 3).

Each step sees what the earlier ones left and nothing of the later ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from mcp_kernels.nn import split_linears
from mcp_kernels.ops._comm import backend_name
from mcp_parallel.config import Config, ModelConfig
from mcp_parallel.division import stage_layers
from mcp_parallel.model.embedding import Mixture
from mcp_parallel.model.family import family_of, whole_model
from mcp_parallel.model.init import fill_shard
from mcp_parallel.model.stage import Block, StageModel, stable_name
from mcp_parallel.optim.lower_tier import LowerTier
from mcp_parallel.parallel.context import share_sequences
from mcp_parallel.parallel.late_reduce import LateReductions
from mcp_parallel.parallel.mesh import Mesh
from mcp_parallel.parallel.precision import Precision
from mcp_parallel.parallel.seen_waits import see_waits
from mcp_parallel.parallel.shards import Shard, is_sharded, iter_shards, like_parameter, local_part
from mcp_parallel.parallel.tensor import cut_layers
from mcp_parallel.schedules.action import SPLIT

Masters = dict[nn.Parameter, Tensor]
"""16-bit weights that the model computes with -> the local fp32 values they are rounded from."""


@dataclass(frozen=True)
class Stage:
    """One pipeline stage on this rank, ready to train."""

    index: int
    model: StageModel
    shards: list[Shard]
    is_first: bool
    is_last: bool
    late: LateReductions | None = None
    """Gradient sums that the end of a step has to wait for; None: backward ends with all done."""


def global_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Whole shape of every parameter of the model, by name, in a fixed order."""
    with torch.device("meta"):
        model = whole_model(config)
    return {stable_name(name): tuple(p.shape) for name, p in model.named_parameters()}


def build_stages(config: Config, mesh: Mesh, tier: LowerTier | None = None) -> list[Stage]:
    """This rank's stages of the model, parallelised and initialised.

    ``Layout.stages_of`` says which: one a rank, several that go round the ranks, or a V; and
    ``stage_layers`` which blocks each has. fp32 values of 16-bit weights live in ``tier``; None is
    beside them.
    """
    layout = mesh.layout
    ranges = stage_layers(config)
    build = family_of(config.model).build_stage
    stages = []
    for index in layout.stages_of(mesh.coordinate.pp):
        is_first, is_last = index == 0, index == layout.num_stages - 1
        with torch.device("meta"):
            model = build(config.model, ranges[index], has_embedding=is_first, has_head=is_last)
        model.to(Precision.of(config).state)
        cut_layers(model, mesh, config.model.seq_len // layout.cp)
        if layout.pp > 1 and layout.schedule in SPLIT:
            split_linears(model)
        share_sequences(model, config, mesh)
        for block in model.blocks.values():
            assert isinstance(block, Block)
            block.remat.policy = config.memory.activation_checkpointing
            block.remat.compression = config.memory.activation_compression
            # Below a CPU's memory is the disk, which is too slow for what a step makes and reads.
            block.remat.to_host = config.memory.offload and mesh.device.type != "cpu"
        if Precision.of(config).mixes_embedding:
            model.mixture = Mixture(Precision.of(config).compute)
        masters = _give_values_and_shard(model, config, mesh, tier)
        late = _overlap_on_cpu(model, mesh)
        tied_copy = is_last and not is_first and config.model.tie_embeddings
        shards = list(iter_shards(model, mesh, masters, is_tied_copy=tied_copy))
        stages.append(Stage(index, model, shards, is_first, is_last, late))
    return stages


def _give_values_and_shard(
    model: StageModel, config: Config, mesh: Mesh, tier: LowerTier | None
) -> Masters:
    masters: Masters = {}
    precision = Precision.of(config)
    policy = _policy(precision)
    for layer, block in model.blocks.items():
        masters |= _give_values(block, f"blocks.{layer}.", config, mesh, tier)
        if is_sharded(mesh.layout):
            _shard(block, mesh, policy, free_after_forward=mesh.layout.zero == 3)
    masters |= _give_values(model, "", config, mesh, tier)
    if is_sharded(mesh.layout):
        # Embedding, last norm and head: the last forward use is just before the first backward one.
        outer = MixedPrecisionPolicy() if precision.mixes_embedding else policy
        _shard(model, mesh, outer, free_after_forward=False)
    return masters


def _overlap_on_cpu(model: StageModel, mesh: Mesh) -> LateReductions | None:
    """Let weights and gradients travel while a CPU computes, where that takes no rank's time."""
    if not is_sharded(mesh.layout) or mesh.device.type != "cpu" or mesh.layout.pp > 1:
        return None
    if _moves_at_once(mesh):
        return None
    gather_ahead(model)
    # The sum over HSDP's replicas follows on the one over shards at once.
    return reduce_late(model) if not mesh.layout.is_hybrid else None


def _moves_at_once(mesh: Mesh) -> bool:
    """In shared memory bytes move only while a rank moves them: asking early gains nothing."""
    return backend_name(mesh.data_group, torch.empty(0)) == "shm"


def gather_ahead(model: StageModel, is_on: bool = True) -> None:
    """Ask for the weights of a block while the one before it runs, and wait for them at its start.

    ``fully_shard`` overlaps through streams of a GPU. On a CPU, where it has none, each gathering
    would begin when its block does and be waited for at once. Two blocks' weights are then whole at
    a time.

    Args:
        model: a stage under ``fully_shard``; backward then does so in the reverse order.
        is_on: False is torch's own way again.
    """
    blocks = [block for block in model.blocks.values() if isinstance(block, FSDPModule)]
    for block, following in pairwise(blocks):
        block.set_modules_to_forward_prefetch([following] if is_on else [])
    assert isinstance(model, FSDPModule)
    model._set_unshard_async_op(is_on)


def reduce_late(model: StageModel) -> LateReductions:
    """Do not wait for a module's reduce-scatter where it starts; ``finish`` waits for all.

    Args:
        model: a stage under ``fully_shard`` on a mesh of one dimension.
    """
    late = LateReductions()
    blocks = list(model.blocks.values())
    own = {parameter for block in blocks for parameter in block.parameters()}
    for block in blocks:
        late.take_over(block, list(block.parameters()))
    late.take_over(model, [p for p in model.parameters() if p not in own])
    return late


def _give_values(
    module: nn.Module, prefix: str, config: Config, mesh: Mesh, tier: LowerTier | None
) -> Masters:
    """Allocate and fill the parameters of ``module`` that have no memory yet."""
    masters: Masters = {}
    precision = Precision.of(config)
    made: dict[nn.Parameter, nn.Parameter] = {}  # a tied parameter is made once
    for owner_name, owner in module.named_modules():
        for leaf, parameter in owner._parameters.items():
            if parameter is None or not parameter.is_meta:
                continue
            if parameter not in made:
                full_name = f"{prefix}{owner_name}.{leaf}"
                name = stable_name(full_name)
                made[parameter] = _initial(parameter, name, config, mesh)
                if not is_sharded(mesh.layout) and precision.rounds(name):
                    made[parameter], master = _rounded(made[parameter], precision.compute, tier)
                    masters[made[parameter]] = master
            owner.register_parameter(leaf, made[parameter])
    return masters


def _initial(parameter: nn.Parameter, name: str, config: Config, mesh: Mesh) -> nn.Parameter:
    """``parameter`` with memory and the values that its name and place give it."""
    values = nn.Parameter(torch.empty_like(parameter, device=mesh.device))
    shard = Shard(name, values, counted_here=True, grad_partial_over_tp=False)
    fill_shard(
        shard.local,
        name,
        shard.global_shape,
        shard.offsets,
        seed=config.train.seed,
        std=family_of(config.model).parameter_std(name, config.model),
    )
    return values


def _rounded(
    values: nn.Parameter, dtype: torch.dtype, tier: LowerTier | None
) -> tuple[nn.Parameter, Tensor]:
    """A parameter of the rounded values, and the local values that it was rounded from."""
    master = local_part(values.detach())
    if tier is not None and not tier.is_far:  # from far away it could hold no gradient
        master = tier.zeros_like(master).copy_(master)
    return nn.Parameter(like_parameter(values, master.to(dtype))), master


def _policy(precision: Precision) -> MixedPrecisionPolicy:
    """Weights are gathered as the model computes; gradients are summed as weights are kept."""
    if not precision.is_narrow:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(
        param_dtype=precision.compute, reduce_dtype=precision.state, cast_forward_inputs=False
    )


def _shard(
    module: nn.Module, mesh: Mesh, policy: MixedPrecisionPolicy, *, free_after_forward: bool
) -> None:
    """ZeRO by ``fully_shard``: 1 and 2 keep parameters whole through the step, 3 frees them.

    What tells 1 from 2, when gradients are reduced, is the executor's choice for each micro-batch.
    """
    assert mesh.device_mesh is not None
    zero_mesh = mesh.device_mesh[mesh.zero_axes]
    fully_shard(module, mesh=zero_mesh, reshard_after_forward=free_after_forward, mp_policy=policy)
    assert isinstance(module, FSDPModule)
    # The loss is already divided by the global number of tokens, so gradients are summed as is.
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)
    if mesh.device.type == "cpu":
        see_waits(module)
