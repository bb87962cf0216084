"""int4_compress, _decompress and _reduce: every body against the definition, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from codec_cases import CodecTests, NaiveCodec

pytestmark = pytest.mark.usefixtures("poisoned_memory")


class TestInt4(CodecTests):
    """int4: two's complement in four bits."""

    codec = NaiveCodec("int4", 4, np.array([*range(8), *range(-8, 0)], dtype=np.float64))
