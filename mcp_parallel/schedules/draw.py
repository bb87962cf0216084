"""A timeline for eyes: as text for a terminal, as pixels for a PNG. No torch."""

from __future__ import annotations

from mcp_parallel.schedules.png import Canvas
from mcp_parallel.schedules.simulate import Timeline

# A cell of text holds a kind and two digits; a cell of pixels the same in Canvas's digits.
_CELL_CHARACTERS = 4
_CELL_PIXELS = 34
_ROW_PIXELS = 30
_MARGIN_PIXELS = 44
# A PNG of this width is read by every viewer; longer timelines get narrower cells.
_MAX_WIDTH_PIXELS = 16_000

Color = tuple[int, int, int]
_COLORS: dict[str, Color] = {
    "F": (126, 170, 226),
    "B": (132, 204, 190),
    "I": (150, 214, 160),
    "W": (240, 196, 110),
}
_IDLE: Color = (238, 238, 238)
_EDGE: Color = (255, 255, 255)
_INK: Color = (30, 30, 30)


def as_text(timeline: Timeline) -> str:
    """One line a rank: ``F3`` is the forward of micro-batch 3, dots are the bubble.

    Capitals are a rank's even chunks (0, 2, ...), small letters its odd ones. Time runs to the
    right, ``_CELL_CHARACTERS`` columns for the shortest action.
    """
    scale = _CELL_CHARACTERS / _shortest(timeline)
    width = round(timeline.makespan * scale)
    lines = [_headline(timeline)]
    for rank, spans in enumerate(timeline.ranks):
        row = ["."] * width
        for action, start, end in ((s.action, s.start, s.end) for s in spans):
            left, right = round(start * scale), round(end * scale)
            kind = action.kind.lower() if action.chunk % 2 else action.kind
            label = f"{kind}{action.microbatch}"[: right - left - 1]
            row[left:right] = f"{label:<{right - left}}"
        lines.append(f"rank {rank:<3} {''.join(row)}  {timeline.bubble(rank):6.1%} idle")
    lines.append("F forward, B backward, I input gradient, W weight gradient; small: odd chunks")
    return "\n".join(lines)


def as_png(timeline: Timeline) -> bytes:
    """The same as a picture: a row a rank, a box an action with its micro-batch's number.

    Later chunks are darker. A PNG file's bytes.
    """
    room = _MAX_WIDTH_PIXELS - 2 * _MARGIN_PIXELS
    scale = min(_CELL_PIXELS / _shortest(timeline), room / timeline.makespan)
    width = 2 * _MARGIN_PIXELS + round(timeline.makespan * scale)
    canvas = Canvas(width, _ROW_PIXELS * len(timeline.ranks) + _MARGIN_PIXELS, _EDGE)
    for rank, spans in enumerate(timeline.ranks):
        top = _MARGIN_PIXELS // 2 + rank * _ROW_PIXELS
        canvas.write(f"{rank}", _MARGIN_PIXELS // 2, top + _ROW_PIXELS // 2, _INK)
        end = _MARGIN_PIXELS + round(timeline.makespan * scale)
        canvas.fill(_MARGIN_PIXELS, top + 1, end, top + _ROW_PIXELS - 1, _IDLE)
        for span in spans:
            left = _MARGIN_PIXELS + round(span.start * scale)
            right = max(left + 1, _MARGIN_PIXELS + round(span.end * scale) - 1)
            color = _shade(_COLORS[span.action.kind], span.action.chunk, timeline.plan.chunks)
            canvas.fill(left, top + 1, right, top + _ROW_PIXELS - 1, color)
            label = f"{span.action.kind}{span.action.microbatch}"
            if Canvas.width_of(label) <= right - left:
                canvas.write(label, (left + right) // 2, top + _ROW_PIXELS // 2, _INK)
    return canvas.png()


def _headline(timeline: Timeline) -> str:
    plan = timeline.plan
    mean = sum(timeline.bubble(rank) for rank in range(plan.pp)) / plan.pp
    return (
        f"{plan.schedule}: {plan.pp} ranks of {plan.chunks} stages, {plan.num_microbatches} "
        f"micro-batches, makespan {timeline.makespan:g}, bubble {mean:.1%}"
    )


def _shortest(timeline: Timeline) -> float:
    """The shortest action that takes time; at most 40 times shorter than the longest, for width."""
    times = [s.end - s.start for spans in timeline.ranks for s in spans if s.end > s.start]
    return max(min(times), max(times) / 40)


def _shade(color: Color, chunk: int, chunks: int) -> Color:
    keep = 1 - 0.3 * chunk / max(1, chunks - 1)
    return (int(color[0] * keep), int(color[1] * keep), int(color[2] * keep))
