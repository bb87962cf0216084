"""fp8_compress, _decompress and _reduce: every body against the definition, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from codec_cases import CodecTests, NaiveCodec

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def e4m3_values():
    """What each byte means: sign, four bits of exponent with bias 7, three of fraction."""
    code = np.arange(256)
    exponent, fraction = code >> 3 & 15, code & 7
    magnitude = np.where(
        exponent == 0, fraction * 2.0**-9, (1 + fraction / 8) * 2.0 ** (exponent - 7.0)
    )
    magnitude[(code & 127) == 127] = np.nan
    return np.where(code >= 128, -magnitude, magnitude)


class TestFp8(CodecTests):
    """fp8: E4M3 with a NaN and no infinity."""

    codec = NaiveCodec("fp8", 8, e4m3_values())
