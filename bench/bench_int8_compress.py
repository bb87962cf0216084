"""int8_compress, _decompress and _reduce beside an in-place scale as floor.

Goal: at least 0.9 of the in-place scale's bytes a second for compress.
"""

from __future__ import annotations

import pytest
from codec_bench import PATHS
from scaled_codecs import bench_codec


@pytest.mark.parametrize("what", ["compress", "decompress", "reduce"])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.benchmark(group="int8")
def bench_int8(path, what, compare):
    bench_codec("int8", 8, what, path, compare)
