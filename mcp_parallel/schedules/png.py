"""A small picture of filled boxes and short labels, written as PNG without another package.

Source of the format: W3C, "Portable Network Graphics (PNG) Specification", 8-bit RGB.
"""

from __future__ import annotations

import struct
import zlib

# Three columns by five rows, the left column the highest bit of each row.
_GLYPHS = {
    "0": (7, 5, 5, 5, 7),
    "1": (2, 6, 2, 2, 7),
    "2": (7, 1, 7, 4, 7),
    "3": (7, 1, 3, 1, 7),
    "4": (5, 5, 7, 1, 1),
    "5": (7, 4, 7, 1, 7),
    "6": (7, 4, 7, 5, 7),
    "7": (7, 1, 1, 2, 2),
    "8": (7, 5, 7, 5, 7),
    "9": (7, 5, 7, 1, 7),
    "F": (7, 4, 6, 4, 4),
    "B": (6, 5, 6, 5, 6),
    "I": (7, 2, 2, 2, 7),
    "W": (5, 5, 7, 7, 5),
}
_DOT = 2
"""Pixels of a glyph's dot on each side."""


class Canvas:
    """``width`` x ``height`` pixels of RGB."""

    def __init__(self, width: int, height: int, color: tuple[int, int, int]) -> None:
        self.width, self.height = width, height
        self._rows = [bytearray(bytes(color) * width) for _ in range(height)]

    def fill(
        self, left: int, top: int, right: int, bottom: int, color: tuple[int, int, int]
    ) -> None:
        """Paint the box, right and bottom edge excluded; what lies outside is cut off."""
        left, right = max(0, left), min(self.width, right)
        for row in self._rows[max(0, top) : max(0, bottom)]:
            row[3 * left : 3 * right] = bytes(color) * max(0, right - left)

    def write(self, text: str, x: int, y: int, color: tuple[int, int, int]) -> None:
        """Digits and the letters F, B, I, W, centred on ``(x, y)``."""
        left = x - self.width_of(text) // 2
        top = y - 5 * _DOT // 2
        for character in text:
            for row, bits in enumerate(_GLYPHS[character]):
                for column in range(3):
                    if bits >> (2 - column) & 1:
                        dot_x, dot_y = left + column * _DOT, top + row * _DOT
                        self.fill(dot_x, dot_y, dot_x + _DOT, dot_y + _DOT, color)
            left += 4 * _DOT

    @staticmethod
    def width_of(text: str) -> int:
        """Pixels that ``write`` covers across."""
        return (4 * len(text) - 1) * _DOT

    def png(self) -> bytes:
        """The file's bytes."""
        header = struct.pack(">IIBBBBB", self.width, self.height, 8, 2, 0, 0, 0)
        pixels = zlib.compress(b"".join(b"\0" + row for row in self._rows))
        return b"\x89PNG\r\n\x1a\n" + b"".join(
            _part(name, data)
            for name, data in ((b"IHDR", header), (b"IDAT", pixels), (b"IEND", b""))
        )


def _part(name: bytes, data: bytes) -> bytes:
    checksum = struct.pack(">I", zlib.crc32(name + data))
    return struct.pack(">I", len(data)) + name + data + checksum
