"""Sizes of pipeline plans to draw from."""

from __future__ import annotations

from hypothesis import strategies as st

from mcp_parallel.schedules.build import SCHEDULES


@st.composite
def sizes(draw):
    """A schedule with sizes that it runs: ``(schedule, pp, micro-batches, chunks)``."""
    schedule = draw(st.sampled_from(sorted(SCHEDULES)))
    pp = draw(st.integers(1, 7))
    if schedule in ("zbv", "dualpipev"):
        chunks, least = 2, 2 * pp if schedule == "dualpipev" else 1
        return schedule, pp, draw(st.integers(least, least + 20)), chunks
    chunks = draw(st.integers(1, 4)) if schedule in ("interleaved", "zero_bubble") else 1
    count = draw(st.integers(1, 6)) * pp if chunks > 1 else draw(st.integers(1, 20))
    return schedule, pp, count, chunks
