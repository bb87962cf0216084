"""The ops of a Transformer block beside torch's, all in one table of ratios.

    python bench/bench_block_ops.py

Runs the benches of rms_norm, swiglu and rotary; each lies in a file of its op's name.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
FILES = ["bench_rms_norm.py", "bench_swiglu.py", "bench_rotary.py"]

if __name__ == "__main__":
    options = ["--benchmark-enable", "--benchmark-only", "--benchmark-disable-gc", "-q"]
    sys.exit(pytest.main([*(str(HERE / name) for name in FILES), *options, *sys.argv[1:]]))
