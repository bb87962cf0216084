"""Where images come from, found without reading them. No numpy, no torch."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import NamedTuple

DIGITS = "digits"
"""The name, in ``data.path``, of the handwritten digits that scikit-learn's package holds."""


class ImageShape(NamedTuple):
    """What every image of a set has."""

    image_size: int
    """Pixels along a side."""
    channels: int
    """Values of a pixel."""
    num_classes: int
    """Labels are below it."""


DIGITS_SHAPE = ImageShape(image_size=8, channels=1, num_classes=10)


def digits_file() -> Path | None:
    """The file of the digits in the installed scikit-learn, which is not imported; None without.

    Importing scikit-learn takes seconds and starts threads, which a process that forks its ranks
    must not have.
    """
    found = importlib.util.find_spec("sklearn")
    if found is None or not found.submodule_search_locations:
        return None
    path = Path(found.submodule_search_locations[0], "datasets", "data", "digits.csv.gz")
    return path if path.is_file() else None
