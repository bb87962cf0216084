"""What 1-bit Adam costs in convergence, on real data; ``bench/plots`` draws the same runs."""

from __future__ import annotations

import statistics

import pytest
from onebit_convergence import train_bytes, train_digits

SEEDS = (0, 1, 2)


def final(ranks, train, variant, steps):
    """Mean over seeds of the last value."""
    return statistics.mean(
        ranks.run(train, variant, seed, steps, ranks=2, timeout=1500.0)[0][-1][1] for seed in SEEDS
    )


@pytest.mark.slow
@pytest.mark.timeout(5400)
def test_byte_model(ranks):
    """Validation loss within 1 % of AdamW's; without error feedback clearly worse."""
    losses = {v: final(ranks, train_bytes, v, 400) for v in ("adamw", "onebit", "no-ef")}
    gap, without = (losses[v] / losses["adamw"] - 1 for v in ("onebit", "no-ef"))
    assert gap < 0.01, losses
    assert without > 0.03, losses


@pytest.mark.slow
def test_digits(ranks):
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
    accuracy = {v: final(ranks, train_digits, v, 600) for v in ("adamw", "onebit")}
    assert accuracy["onebit"] > accuracy["adamw"] - 1.0, accuracy
