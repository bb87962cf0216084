"""What the Triton bodies of rms_norm leave to the reference; read without importing Triton."""

from __future__ import annotations

from torch import Tensor

# A row is held in registers: 64 KiB of float32, with its gradient and the weight's beside it.
MOST_FEATURES = 16384


def refuses(x: Tensor, *args: object) -> str | None:
    """Why ``rms_norm`` or ``add_rms_norm`` is not taken, or None."""
    if x.shape[-1] > MOST_FEATURES:
        return f"needs at most {MOST_FEATURES} features, got {x.shape[-1]}"
    return None


def refuses_backward(dy: Tensor, *args: object) -> str | None:
    """Why ``rms_norm_bwd`` is not taken, or None."""
    return refuses(dy)
