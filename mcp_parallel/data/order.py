"""The order of samples: a pure function of (seed, position), a new permutation each epoch.

Position p of the run is element p mod n of epoch p // n. Each epoch's permutation is a Feistel
network over the smallest even number of bits that holds n, walked until it lands below n again
(Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002, method "cycle walking").
Nothing is stored, so any rank of any layout computes any row of any step on its own.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 6
"""Four make a strong permutation of a large domain (Luby, Rackoff 1988); small n get two more."""

# splitmix64's increment and finalizer (Steele, Lea and Flood 2014), public domain constants.
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)

_U64 = NDArray[np.uint64]


def sample_index(seed: int, position: int, num_samples: int) -> int:
    """The sample at a global position of the run.

    Args:
        seed: ``data.seed``, at least 0 and below 2**63.
        position: samples before this one over the whole run, at least 0 and below 2**63.
        num_samples: samples in the corpus, at least 1 and below 2**62.

    Returns:
        An index in ``[0, num_samples)``. Over ``num_samples`` consecutive positions from a multiple
        of ``num_samples``, each index comes once.
    """
    return int(sample_indices(seed, np.array([position], dtype=np.int64), num_samples)[0])


def sample_indices(seed: int, positions: NDArray[np.int64], num_samples: int) -> NDArray[np.int64]:
    """``sample_index`` of each position, ``[N]`` int64.

    Raises:
        ValueError: an argument is out of the range that ``sample_index`` states.

    Cost: about 2 * 6 mixing rounds an element in numpy, no memory beyond a few arrays of N.
    """
    _check(seed, positions, num_samples)
    n = np.uint64(num_samples)
    position = positions.astype(np.uint64)
    # Twice mixed, so that (seed, epoch) and (seed + 1, epoch - 1) share nothing.
    keys = _mixed(_mixed(np.full_like(position, seed)) ^ (position // n))
    half_bits = np.uint64(max(1, -(-(num_samples - 1).bit_length() // 2)))
    index = _permuted(position % n, keys, half_bits)
    while True:
        # The domain is below 4n (2n for most n), so a walk takes a few steps on average, and it
        # returns for sure: the start itself is below n and on the same cycle.
        (outside,) = np.nonzero(index >= n)
        if outside.size == 0:
            return index.astype(np.int64)
        index[outside] = _permuted(index[outside], keys[outside], half_bits)


def _check(seed: int, positions: NDArray[np.int64], num_samples: int) -> None:
    if not 0 <= seed < 1 << 63:
        raise ValueError(f"sample_indices: seed must be in [0, 2**63), got {seed}; use 0")
    if not 1 <= num_samples < 1 << 62:
        raise ValueError(
            f"sample_indices: num_samples must be in [1, 2**62), got {num_samples}; give more data"
        )
    if positions.size and int(positions.min()) < 0:
        raise ValueError(
            f"sample_indices: positions must be at least 0, got {int(positions.min())}; "
            "count from the first sample of the run"
        )


def _permuted(value: _U64, keys: _U64, half_bits: np.uint64) -> _U64:
    """One pass of the Feistel network over ``2 * half_bits`` bits."""
    mask = (np.uint64(1) << half_bits) - np.uint64(1)
    left, right = value >> half_bits, value & mask
    for round_number in range(1, _ROUNDS + 1):
        round_keys = keys + _GOLDEN * np.full_like(keys, round_number)
        left, right = right, left ^ (_mixed(right ^ round_keys) & mask)
    return (left << half_bits) | right


def _mixed(value: _U64) -> _U64:
    """splitmix64 of each element; arithmetic is modulo 2**64."""
    value = value + _GOLDEN
    value = (value ^ (value >> np.uint64(30))) * _MIX_1
    value = (value ^ (value >> np.uint64(27))) * _MIX_2
    return value ^ (value >> np.uint64(31))
