"""Images with their classes: read whole, split for good, normalised, cut into patches.

The digits are the 1,797 of 8 x 8 pixels in 17 gray levels that scikit-learn's package holds
(Alpaydin and Kaynak, "Optical recognition of handwritten digits", UCI, 1998; the writers are not
told, so both parts of the split hold every writer).
"""

from __future__ import annotations

import gzip
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mcp_parallel.data.corpus import IGNORED_TARGET
from mcp_parallel.data.image_files import DIGITS_SHAPE, digits_file
from mcp_parallel.data.order import sample_indices

# One image in five is kept for validation: the standard error of an accuracy of 97 % measured on
# 360 of them is 0.9 points.
VALIDATION_SHARE = 0.2
# Of the permutation that splits, apart from every seed a run may have: the same images validate
# every run.
_SPLIT_SEED = (1 << 63) - 25
_DIGITS = 1797


@dataclass(frozen=True)
class ImageSet:
    """Images and their classes."""

    images: NDArray[np.float32]
    """``[N, H, W, C]``, normalised."""
    labels: NDArray[np.int64]
    """``[N]``."""

    def __len__(self) -> int:
        return len(self.labels)

    def samples(
        self, indices: NDArray[np.int64], patch_size: int
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """``(patches [N, S, P], labels [N])`` of the images at ``indices``."""
        return to_patches(self.images[indices], patch_size), self.labels[indices]


@dataclass(frozen=True)
class Images:
    """A data set in its two parts."""

    train: ImageSet
    validation: ImageSet


def open_digits() -> Images:
    """The digits of the installed scikit-learn.

    Raises:
        ValueError: scikit-learn is not installed, or its file is not what it was.
        OSError: the file cannot be read.
    """
    path = digits_file()
    if path is None:
        raise ValueError(
            "data: data.path = digits must have scikit-learn installed, whose package holds the "
            "images, got none; pip install scikit-learn"
        )
    return split(*_read_digits(path))


def _read_digits(path: Path) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    size, _, classes = DIGITS_SHAPE
    with gzip.open(path, "rt", encoding="ascii") as file:
        # A row is an image: its pixels, then its class.
        table = np.loadtxt(file, delimiter=",", ndmin=2)
    pixels, labels = table[:, :-1], table[:, -1].astype(np.int64)
    is_whole = table.shape == (_DIGITS, size * size + 1) and set(labels) == set(range(classes))
    if not is_whole or pixels.min() < 0 or pixels.max() > 16:
        raise ValueError(
            f"data: {str(path)!a} must hold {_DIGITS} images of {size} x {size} pixels in 0..16, "
            f"got a table of {table.shape}; install scikit-learn anew"
        )
    return pixels.reshape(-1, size, size, 1), labels


def split(images: NDArray[np.float64], labels: NDArray[np.int64]) -> Images:
    """Both parts of ``images`` ``[N, H, W, C]``, normalised by the training part's statistics.

    Which image goes where depends on its index and their number alone.
    """
    count = len(labels)
    order = sample_indices(_SPLIT_SEED, np.arange(count, dtype=np.int64), count)
    held_out = round(VALIDATION_SHARE * count)
    chosen = np.zeros(count, dtype=bool)
    chosen[order[:held_out]] = True
    mean = images[~chosen].mean((0, 1, 2))  # of each channel
    deviation = images[~chosen].std((0, 1, 2))
    normal = ((images - mean) / deviation).astype(np.float32)
    return Images(
        ImageSet(normal[~chosen], labels[~chosen]), ImageSet(normal[chosen], labels[chosen])
    )


def to_patches(images: NDArray[np.float32], patch_size: int) -> NDArray[np.float32]:
    """``[N, H, W, C]`` as ``[N, S, P]``: patches row by row, and pixels so within each.

    Args:
        images: H and W are multiples of ``patch_size``.
        patch_size: pixels along a patch's side.
    """
    count, height, width, channels = images.shape
    rows, columns = height // patch_size, width // patch_size
    cut = images.reshape(count, rows, patch_size, columns, patch_size, channels)
    return cut.transpose(0, 1, 3, 2, 4, 5).reshape(count, rows * columns, -1)


class ImageSource:
    """Any rows of any step, from (images, data seed, step) alone; see ``data/batch.py``."""

    def __init__(
        self, images: Images, data_seed: int, patch_size: int, global_batch_size: int
    ) -> None:
        self._images = images
        self._data_seed = data_seed
        self._patch_size = patch_size
        self._global_batch_size = global_batch_size

    def batch(self, step: int, rows: range) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Rows of the training batch of a step: ``(patches [N, S, P], labels [N])``."""
        first = step * self._global_batch_size
        positions = np.arange(rows.start, rows.stop, rows.step, dtype=np.int64) + first
        train = self._images.train
        return train.samples(
            sample_indices(self._data_seed, positions, len(train)), self._patch_size
        )

    @property
    def num_validation_batches(self) -> int:
        """Batches, each as large as one of training, that hold the validation part."""
        return -(-len(self._images.validation) // self._global_batch_size)

    def validation_batch(
        self, index: int, rows: range
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Rows of a batch of the validation part, in its own order; past its end -100 is wanted."""
        held_out = self._images.validation
        at = np.arange(rows.start, rows.stop, rows.step) + index * self._global_batch_size
        is_past = at >= len(held_out)
        patches, labels = held_out.samples(np.where(is_past, 0, at), self._patch_size)
        return patches, np.where(is_past, IGNORED_TARGET, labels)
