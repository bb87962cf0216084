"""int8_compress, _decompress and _reduce: every body against the definition, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from codec_cases import CodecTests, NaiveCodec

pytestmark = pytest.mark.usefixtures("poisoned_memory")


class TestInt8(CodecTests):
    """int8: two's complement bytes."""

    codec = NaiveCodec("int8", 8, np.arange(256, dtype=np.uint8).view(np.int8).astype(np.float64))
