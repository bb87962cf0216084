"""Training runs on real data that compare 1-bit Adam with AdamW, for the slow tests and the plots.

``bytes``: the ``tiny`` model on the standard library's text, with the batch and the learning rates
that it trains with by default; ``digits``: a perceptron on scikit-learn's digits. Each on the ranks
that call it, the same data in every variant:

    adamw    full precision throughout
    onebit   signs after a fifth of the steps
    no-ef    the same without error feedback: what coding loses is dropped
"""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from mcp_kernels.optim import OneBitAdam
from mcp_parallel.config import Config
from mcp_parallel.data.batch import BatchSource
from mcp_parallel.data.corpus import open_corpus
from mcp_parallel.layout import Layout
from mcp_parallel.optim.schedule import learning_rate
from mcp_parallel.parallel.mesh import build_mesh
from mcp_parallel.step import TrainingStep

VARIANTS = ("adamw", "onebit", "no-ef")
FROZEN_AFTER = 0.2
"""Part of the steps that stage 1 takes."""
EVALUATIONS = 20


def drop_errors(optimizer):
    for bucket in optimizer.buckets:
        if bucket.worker_error is not None:
            bucket.worker_error.zero_()
            bucket.server_error.zero_()


# --- bytes --------------------------------------------------------------------------------------


def bytes_config(world, variant, seed, steps):
    train = {"steps": steps, "seed": seed}
    if variant != "adamw":
        train |= {"optimizer": "onebit_adam", "freeze_step": int(FROZEN_AFTER * steps)}
    return Config.from_mapping(
        {
            "model": {"preset": "tiny"},
            "parallel": {"dp": world},
            "train": train,
            "data": {"seed": seed},
        }
    )


def train_bytes(rank, world, variant, seed, steps):
    """[(step, validation loss)]: nats a byte on samples that come after those of the run."""
    config = bytes_config(world, variant, seed, steps)
    step = TrainingStep(config, build_mesh(Layout(dp=world), torch.device("cpu")))
    source = BatchSource(
        *(open_corpus(config.data, config.model), seed),
        *(config.model.seq_len, config.train.global_batch_size),
    )
    curve = []
    for index in range(steps):
        inputs, targets = source.batch(index, step.rows())
        result = step(
            torch.from_numpy(inputs), torch.from_numpy(targets), learning_rate(index, config.train)
        )
        assert result.is_finite
        if variant == "no-ef":
            drop_errors(step.optimizer.adam)
        if (index + 1) % (steps // EVALUATIONS) == 0:
            curve.append((index + 1, validation_loss(step, source, steps)))
    return curve


@torch.no_grad()
def validation_loss(step, source, first, batches=16):
    total, model = torch.zeros(()), step.stages[0].model
    for index in range(first, first + batches):
        inputs, targets = (torch.from_numpy(a) for a in source.batch(index, step.rows()))
        logits = model(inputs)
        if model.leaves_head:
            logits = model.head(logits)
        total += cross_entropy(logits.flatten(0, 1), targets.flatten())
    total /= batches
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


# --- digits -------------------------------------------------------------------------------------


def train_digits(rank, world, variant, seed, steps):
    """[(step, accuracy in percent)] on a quarter of the digits that training never sees."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    images = torch.from_numpy(digits.data[order]).float() / 16
    labels = torch.from_numpy(digits.target[order])
    held_out = len(labels) // 4
    torch.manual_seed(seed)
    net = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    freeze = steps + 1 if variant == "adamw" else int(FROZEN_AFTER * steps)
    optimizer = OneBitAdam(net.parameters(), lr=3e-3, freeze_step=freeze)
    batches = np.random.default_rng(seed).integers(held_out, len(labels), (steps, world, 32))
    curve = []
    for index in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * (1 - index / steps)
        chosen = torch.from_numpy(batches[index, rank])
        optimizer.zero_grad()
        cross_entropy(net(images[chosen]), labels[chosen]).backward()
        optimizer.step()
        if variant == "no-ef":
            drop_errors(optimizer)
        if (index + 1) % (steps // EVALUATIONS) == 0:
            right = net(images[:held_out]).argmax(1) == labels[:held_out]
            curve.append((index + 1, 100 * right.float().mean().item()))
    return curve
