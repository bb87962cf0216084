"""Sizes and the timeout of symmetric-memory channels: fixed before the first one is made."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The same on every rank of a group."""

    slot_bytes: int = 32 << 20
    """Staging of one call; a channel has two. Larger inputs go in pieces of this size."""
    num_rows: int = 2049
    """Rows of flags of a channel; a row holds one 64-bit flag a rank."""
    timeout_s: float = 60.0
    """How long a kernel waits for a peer before it gives up."""

    def __post_init__(self) -> None:
        if self.slot_bytes < 1 << 20 or self.slot_bytes % (1 << 20):
            raise ValueError(
                f"Settings: slot_bytes must be a positive multiple of 1 MiB, got {self.slot_bytes}"
            )
        if self.num_rows < 129:
            raise ValueError(f"Settings: num_rows must be >= 129, got {self.num_rows}")
        if not 1e-3 <= self.timeout_s <= 1e6:
            raise ValueError(
                f"Settings: timeout_s must be in [0.001, 1000000] seconds, got {self.timeout_s}"
            )


_current = Settings()
_is_used = False


def settings() -> Settings:
    """The settings that channels are made with."""
    global _is_used
    _is_used = True
    return _current


def configure(new: Settings) -> None:
    """Replace the settings, before any group has used symmetric memory.

    Args:
        new: the same on every rank.

    Raises:
        RuntimeError: a group has used symmetric memory already.
    """
    global _current
    if _is_used and new != _current:
        raise RuntimeError(
            "symmetric.configure: settings must be made before the first call on a GPU group, got "
            "them after; call it right after init_process_group"
        )
    _current = new
