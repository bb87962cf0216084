"""Philox4x32-10: published vectors, independence of chunking, and the layout of the counter."""

from __future__ import annotations

import pytest
import torch

from mcp_kernels.ops.philox import philox, philox_uint32

# Counter words, key words, output words: Random123 v1.14.0, tests/kat_vectors, philox4x32 10.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000",
     "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff",
     "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0",
     "d16cfe09 94fdcceb 5001e420 24126ea1"),
]  # fmt: skip


def _words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


def _as_int64(low: int, high: int) -> int:
    value = low | high << 32
    return value - (1 << 64) if value >> 63 else value


def _philox_python(counter: list[int], key: int) -> list[int]:
    """The paper's definition on Python integers, one counter."""
    c, k0, k1 = list(counter), key & 0xFFFFFFFF, key >> 32
    for _ in range(10):
        p0, p1 = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(p1 >> 32) ^ c[1] ^ k0, p1 & 0xFFFFFFFF, (p0 >> 32) ^ c[3] ^ k1, p0 & 0xFFFFFFFF]
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_known_answers(counter: str, key: str, answer: str) -> None:
    words, key_words = _words(counter), _words(key)
    seed = key_words[0] | key_words[1] << 32
    got = philox(seed, torch.tensor(words))
    assert [int(word) for word in got] == _words(answer)
    low = torch.tensor([_as_int64(words[0], words[1])])
    got = philox_uint32(seed, low, stream=words[2] | words[3] << 32)
    assert got[:, 0].tolist() == _words(answer)


def test_long_tensor_equals_definition_at_chunk_borders() -> None:
    key, stream = 0x0123456789ABCDEF, 0xFEDCBA9876543210
    start = (1 << 32) - 20_000  # the carry into the second counter word falls inside
    counters = torch.arange(start, start + 40_001)
    got = philox_uint32(key, counters, stream)
    for index in (0, 1, 16383, 16384, 19999, 20000, 32768, 40000):
        value = int(counters[index])
        words = [value & 0xFFFFFFFF, value >> 32, stream & 0xFFFFFFFF, stream >> 32]
        assert got[:, index].tolist() == _philox_python(words, key)
    assert torch.equal(got[:, 12345:23456], philox_uint32(key, counters[12345:23456], stream))


def test_four_broadcast_words_equal_stacked_words() -> None:
    rows, cols = torch.arange(7)[:, None], torch.arange(5)[None, :]
    zero = torch.zeros((), dtype=torch.int64)
    got = torch.stack(philox(9, [rows, cols, zero, zero + 3]), dim=-1)
    stacked = torch.stack(torch.broadcast_tensors(rows, cols, zero, zero + 3), dim=-1)
    assert got.shape == (7, 5, 4)
    assert torch.equal(got, torch.stack(philox(9, stacked), dim=-1))
    assert got[3, 4].tolist() == _philox_python([3, 4, 0, 3], 9)


def test_words_are_uniform_and_keys_independent() -> None:
    words = philox_uint32(1, torch.arange(25_000)).reshape(-1).double() / 2**32
    # Mean of n uniforms has deviation 1 / sqrt(12 n); six of them is one false alarm in 5e8.
    assert abs(float(words.mean()) - 0.5) < 6 / (12 * words.numel()) ** 0.5
    other = philox_uint32(2, torch.arange(25_000)).reshape(-1).double() / 2**32
    correlation = float(torch.corrcoef(torch.stack([words, other]))[0, 1])
    assert abs(correlation) < 6 / words.numel() ** 0.5


def test_empty_and_inputs_unchanged() -> None:
    assert philox_uint32(0, torch.empty(0, dtype=torch.int64)).shape == (4, 0)
    counter = torch.arange(8).view(2, 4)
    philox(3, counter)
    assert torch.equal(counter, torch.arange(8).view(2, 4))


def test_errors() -> None:
    with pytest.raises(ValueError, match="philox: counter must be four words, got 3"):
        philox(0, torch.zeros(2, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match="philox_uint32: counters must be int64"):
        philox_uint32(0, torch.zeros(4))
