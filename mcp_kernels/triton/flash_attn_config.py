"""Tile sizes of the attention kernels, by table: the same call takes the same tiles, always.

Nothing is timed at a first call: a choice that is measured differs between ranks and between runs,
and with it the order of sums. What bounds a row of the tables is said beside it; the cubin test
holds the registers of the 64 and 128 wide rows.

Widths are head dims padded to a power of two. Bytes of shared memory are those of a program: 163
KiB on sm_80, 227 KiB on sm_90, 99 KiB on sm_86 and sm_89.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Tile(NamedTuple):
    """Sizes of one program."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int
    """Depth of the software pipeline that loads what a loop walks over."""


class Chip(NamedTuple):
    """What the tables ask of a GPU."""

    has_wgmma: bool
    """sm_90: a warp group multiplies 64 rows at a time, straight from shared memory."""
    shared_bytes: int
    """Shared memory that a program may take."""
    num_units: int
    """Multiprocessors."""


# Numbers of the datasheets, for compiling without a GPU.
A100 = Chip(False, 163 * 1024, 108)
H100 = Chip(True, 227 * 1024, 132)


def chip_of(device: torch.device) -> Chip:
    """The GPU of ``device``; where it is a CPU (Triton's interpreter), an H100."""
    if device.type != "cuda":
        return H100
    found = torch.cuda.get_device_properties(device)
    return Chip(
        found.major == 9,
        getattr(found, "shared_memory_per_block_optin", 99 * 1024),
        found.multi_processor_count,
    )


def _fit(tile: Tile, held: int, walked: int, chip: Chip) -> Tile:
    """``tile`` with as many stages as shared memory holds.

    Args:
        tile: the wish.
        held: bytes that stay for the whole loop.
        walked: bytes of one step of the loop.
        chip: the GPU.
    """
    stages = max(1, min(tile.num_stages, (chip.shared_bytes - held) // max(1, walked)))
    return tile._replace(num_stages=stages)


def forward_tile(
    width: int, element_bytes: int, is_plain: bool, has_alibi: bool, chip: Chip
) -> Tile:
    """Tile of the forward kernel; ``is_plain`` without bias and dropout, which take registers."""
    if element_bytes == 4:
        # No matrix unit multiplies float32 exactly: products are FMAs on operands in registers.
        wish = Tile(32, 32, 4, 1) if width <= 128 else Tile(16, 32, 4, 1)
    elif width <= 64:
        # 128 x 128 scores over 256 threads are 64 registers beside 32 of the output; with mma.sync
        # (sm_80) operands go through registers too, and half of it has to do. So it has with ALiBi,
        # whose distances are another 64.
        is_large = is_plain and not has_alibi and chip.has_wgmma
        wish = Tile(128, 128 if is_large else 64, 8, 3)
    elif width <= 128:
        # 64 registers of output leave room for 128 x 64 scores with wgmma, 64 x 64 without.
        # A bias or a dropout mask takes as many again.
        is_large = chip.has_wgmma and is_plain
        wish = Tile(128 if is_large else 64, 64, 8, 3 if chip.has_wgmma else 2)
    else:
        # The output alone is 128 registers a thread.
        wish = Tile(128, 32, 8, 2)
    held = wish.rows * width * element_bytes
    return _fit(wish, held, 2 * wish.keys * width * element_bytes, chip)


def key_gradient_tile(
    width: int, element_bytes: int, is_plain: bool, has_dropout: bool, chip: Chip
) -> Tile:
    """Tile of the dK, dV kernel: keys stay, rows are walked over."""
    if element_bytes == 4:
        wish = Tile(16, 32, 4, 1) if width <= 128 else Tile(16, 16, 4, 1)
    elif width <= 128:
        # At 64: dK and dV of 128 keys are 64 registers, k and v as operands 32. At 128 each of dK
        # and dV has a pass of its own. What is left takes scores of 32 rows, not of 64; of 16 with
        # a bias or a dropout mask, and at 128 without wgmma, where q and dO go through registers
        # too and the words of a dropout mask take half of the keys.
        is_roomy = width <= 64 or chip.has_wgmma
        rows = 32 if is_plain and is_roomy else 16
        wish = Tile(rows, 64 if has_dropout and not is_roomy else 128, 8, 2)
    else:
        # Wgmma takes 64 keys a warp group: of 128 each has its own, of 64 both hold half of the
        # columns, and what of k and v does not fit registers goes to the stack.
        wish = Tile(16, 128, 8, 1) if chip.has_wgmma else Tile(32, 64, 8, 1)
    held = 2 * wish.keys * width * element_bytes
    return _fit(wish, held, 2 * wish.rows * width * element_bytes, chip)


def query_gradient_tile(width: int, element_bytes: int, is_plain: bool, chip: Chip) -> Tile:
    """Tile of the dQ kernel: rows stay, keys are walked over."""
    if element_bytes == 4:
        wish = Tile(32, 16, 4, 1) if width <= 128 else Tile(16, 16, 4, 1)
    elif width <= 128:
        # Scores and their gradients of 128 x 64 are 64 registers, dQ of width 128 is another 64;
        # without wgmma the operands q and dO of width 128 take what 64 of the rows would.
        rows = 128 if width <= 64 or chip.has_wgmma else 64
        wish = Tile(rows, 64 if is_plain else 32, 8, 2)
    else:
        wish = Tile(64, 32, 8, 1)
    held = 2 * wish.rows * width * element_bytes
    return _fit(wish, held, 2 * wish.keys * width * element_bytes, chip)


def bias_gradient_tile(width: int, element_bytes: int, chip: Chip) -> Tile:
    """Tile of the dbias kernel: it stays, and all that it was broadcast to is walked over."""
    if element_bytes == 2 and 64 < width <= 128 and not chip.has_wgmma:
        return Tile(32, 64, 8, 2)  # q, k, dO and v all go through registers
    return query_gradient_tile(width, element_bytes, False, chip)


def delta_tile(width: int, element_bytes: int, is_plain: bool, chip: Chip) -> Tile:
    """Tile of the delta kernel of 16-bit types: rows stay, keys are walked over, no sum is wide."""
    if width <= 128:
        # Scores and their gradients of 128 x 128 are 128 registers. Wgmma leaves room for them and
        # the addresses of 64 columns; without it operands go through registers, too, and of 128
        # columns 64 rows have to do.
        is_large = chip.has_wgmma and is_plain and width <= 64
        rows = 128 if width <= 64 or chip.has_wgmma else 64
        wish = Tile(rows, 128 if is_large else 64 if is_plain else 32, 8, 2)
    else:
        wish = Tile(64, 32, 8, 1)
    held = 2 * wish.rows * width * element_bytes
    return _fit(wish, held, 2 * wish.keys * width * element_bytes, chip)


def decode_tile(group_rows: int, width: int, element_bytes: int, chip: Chip) -> Tile:
    """Tile of the decode kernel: bandwidth is the bound, so stages in flight are what counts."""
    # FMAs hold both operands in registers: more than 16 rows of float32 do not fit.
    most = 16 if element_bytes == 4 else 64
    rows = max(16, min(most, 1 << max(0, group_rows - 1).bit_length()))
    keys = 32 if element_bytes == 4 or width > 128 else 64
    wish = Tile(rows, keys, 4, 1 if element_bytes == 4 else 4)
    held = rows * width * element_bytes
    return _fit(wish, held, 2 * keys * width * element_bytes, chip)


def shrink(tile: Tile, num_rows: int, num_keys: int) -> Tile:
    """``tile`` no larger than the problem; 16 is the least that a matrix unit takes."""

    def least(size: int, needed: int) -> int:
        return min(size, max(16, 1 << max(0, needed - 1).bit_length()))

    return tile._replace(rows=least(tile.rows, num_rows), keys=least(tile.keys, num_keys))


def num_splits(programs: int, num_keys: int, tile: Tile, chip: Chip) -> int:
    """Into how many parts decode cuts the keys: enough programs to fill the GPU twice.

    A part is at least 4 tiles, so that loads of one overlap with the sums of another.
    """
    most = max(1, num_keys // (4 * tile.keys))
    return max(1, min(most, -(-2 * chip.num_units // max(1, programs)), 128))
