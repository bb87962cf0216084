"""Tokens/s of a training step, ours beside PyTorch's parallelism and DeepSpeed on two CPU ranks.

Same model, weights, batch, optimizer, clipping, precision (fp32), ranks and threads (one each);
the peers talk over gloo, ours over what the launcher chose (shared memory where it is built);
before timing, the first step's loss and gradient norm of all must agree. Steps run in one pair
of forked ranks, in blocks that take turns (A B C, C B A, ...), so that a busy moment hits all.
DeepSpeed stands beside ours where it can be imported; where not, the bench says why.
"""

from __future__ import annotations

import gc
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from peers import deepspeed_zero
from peers.plain_llama import PlainLlama, Shape
from peers.torch_parallel import (
    WORLD_SIZE,
    data_parallel,
    fully_sharded,
    tensor_parallel,
)

from mcp_parallel.config import Config, ModelConfig, ParallelConfig, TrainConfig
from mcp_parallel.launch.context import RankContext
from mcp_parallel.launch.local import launch_local
from mcp_parallel.layout import Layout
from mcp_parallel.model.init import fill_shard, parameter_std
from mcp_parallel.parallel.mesh import build_mesh
from mcp_parallel.step import TrainingStep

LR = 3e-4
NUM_BLOCKS = 6


@dataclass(frozen=True)
class Size:
    shape: Shape
    global_batch: int
    steps_per_block: int


SIZES = {
    # layers, hidden, heads, kv heads, ffn, vocabulary, sequence
    "tiny": Size(Shape(4, 128, 8, 4, 352, 256, 128), global_batch=16, steps_per_block=5),
    "20m": Size(Shape(8, 384, 6, 6, 1024, 8192, 256), global_batch=8, steps_per_block=1),
}


Step = Callable[[torch.Tensor, torch.Tensor], tuple[float, float]]


def deepspeed(stage: int) -> Callable[..., Step]:
    return partial(deepspeed_zero.DeepSpeedZero, stage=stage)


@dataclass(frozen=True)
class Rivals:
    ours: ParallelConfig
    peers: dict[str, Callable[..., Step]]
    is_data_parallel: bool = True


LAYOUTS = {
    "dp2": Rivals(ParallelConfig(dp=2), {"torch_ddp": data_parallel}),
    "tp2": Rivals(ParallelConfig(tp=2), {"torch_dtensor_tp": tensor_parallel}, False),
    "zero1": Rivals(ParallelConfig(dp=2, zero=1), {"deepspeed_zero1": deepspeed(1)}),
    "zero2": Rivals(
        ParallelConfig(dp=2, zero=2),
        {
            "torch_fsdp2_kept": partial(fully_sharded, reshard_after_forward=False),
            "deepspeed_zero2": deepspeed(2),
        },
    ),
    "zero3": Rivals(
        ParallelConfig(dp=2, zero=3),
        {"torch_fsdp2": fully_sharded, "deepspeed_zero3": deepspeed(3)},
    ),
}


def configure(size: Size, rivals: Rivals) -> Config:
    shape = size.shape
    rows = size.global_batch // rivals.ours.dp
    return Config(
        model=ModelConfig(
            preset=None,
            num_layers=shape.num_layers,
            hidden_size=shape.hidden_size,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            ffn_size=shape.ffn_size,
            vocab_size=shape.vocab_size,
            seq_len=shape.seq_len,
            rope_theta=shape.rope_theta,
            norm_eps=shape.norm_eps,
        ),
        parallel=rivals.ours,
        train=TrainConfig(global_batch_size=size.global_batch, micro_batch_size=rows, lr=LR),
    )


def plain_model(config: Config, shape: Shape) -> PlainLlama:
    """The peer's model with our initial weights, parameter by parameter."""
    model = PlainLlama(shape)
    for plain_name, parameter in model.named_parameters():
        name = plain_name if "norm" in plain_name else plain_name.removesuffix(".weight")
        fill_shard(
            parameter.data,
            name,
            tuple(parameter.shape),
            (0,) * parameter.dim(),
            seed=config.train.seed,
            std=parameter_std(name, config.model),
        )
    return model


def compare_steps(
    context: RankContext, size: Size, rivals: Rivals, num_blocks: int
) -> dict[str, list[float]]:
    """Seconds of each step of ours and of each peer, on one rank of the pair."""
    torch.set_num_threads(1)
    config = configure(size, rivals)
    mesh = build_mesh(Layout.from_config(config.parallel), context.device)
    assert mesh is not None
    ours = TrainingStep(config, mesh)
    peers = {
        name: make(
            plain_model(config, size.shape),
            lr=LR,
            weight_decay=config.train.weight_decay,
            rows=len(ours.rows()),
        )
        for name, make in rivals.peers.items()
    }
    tokens = torch.randint(
        size.shape.vocab_size,
        (size.global_batch, size.shape.seq_len + 1),
        generator=torch.Generator().manual_seed(0),
    )[ours.rows().start : ours.rows().stop]
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    runs: dict[str, Callable[[], object]] = {"ours": partial(ours, inputs, targets, LR)}
    runs |= {name: partial(peer, inputs, targets) for name, peer in peers.items()}

    result = ours(inputs, targets, LR)
    for name, peer in peers.items():
        loss, norm = peer(inputs, targets)
        if rivals.is_data_parallel:  # the peer's loss is that of its own rows
            mean = torch.tensor(loss)
            dist.all_reduce(mean)
            loss = float(mean) / WORLD_SIZE
        assert result.loss == pytest.approx(loss, rel=1e-4), f"{name} trains another model"
        assert result.grad_norm == pytest.approx(norm, rel=1e-4), f"{name} has another gradient"

    times: dict[str, list[float]] = {name: [] for name in runs}
    for block in range(num_blocks):
        for name in sorted(runs, reverse=block % 2 == 1):
            gc.collect()
            dist.barrier()
            for _ in range(size.steps_per_block):
                start = time.perf_counter()
                runs[name]()
                times[name].append(time.perf_counter() - start)
    return times


@pytest.fixture(scope="module")
def deepspeed_refusal() -> str:
    """Why DeepSpeed is not timed; "" where it is."""
    return deepspeed_zero.refusal()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", SIZES)
def bench_trainer(benchmark, tmp_path: Path, deepspeed_refusal: str, size: str, layout: str):
    """Time of a step in steady state: warm-up is the step whose loss was compared."""
    rivals, chosen = LAYOUTS[layout], SIZES[size]
    missing = [name for name in rivals.peers if deepspeed_refusal and "deepspeed" in name]
    rivals = replace(rivals, peers={k: v for k, v in rivals.peers.items() if k not in missing})
    num_blocks = 1 if benchmark.disabled else NUM_BLOCKS
    report = tmp_path / "times.json"

    def rank(context: RankContext) -> int:
        times = compare_steps(context, chosen, rivals, num_blocks)
        if context.rank == 0:
            report.write_text(json.dumps(times))
        return 0

    status = benchmark.pedantic(launch_local, (rank, WORLD_SIZE), rounds=1, iterations=1)
    assert status == 0, "a rank failed; its error is above"
    tokens = chosen.global_batch * chosen.shape.seq_len
    seconds = {
        name: {"min": min(times), "median": statistics.median(times)}
        for name, times in json.loads(report.read_text()).items()
    }
    for name, s in seconds.items():
        benchmark.extra_info[f"tokens/s of {name}"] = {k: round(tokens / s[k]) for k in s}
    for name in rivals.peers:
        benchmark.extra_info[f"ours over {name}"] = {
            k: round(seconds[name][k] / seconds["ours"][k], 3) for k in seconds["ours"]
        }
    for name in missing:
        why = {"min": "not timed", "median": deepspeed_refusal}
        benchmark.extra_info[f"ours over {name}"] = why
