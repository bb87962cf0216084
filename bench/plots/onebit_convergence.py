"""Draw what 1-bit Adam costs in convergence: ``python bench/plots/onebit_convergence.py``.

Trains every variant of ``tests/onebit_convergence.py`` on two ranks with three seeds and writes
``onebit_bytes.svg``, ``onebit_digits.svg`` (where scikit-learn is installed) and the numbers as
JSON beside this file. Cost: about 6 minutes on two quiet cores, one of them for the digits
(``--task digits`` draws those alone).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent.parent), str(HERE.parent.parent / "tests")]

from onebit_convergence import FROZEN_AFTER, VARIANTS, train_bytes, train_digits  # noqa: E402
from ranks import RankPool  # noqa: E402

COLORS = {"adamw": "#333333", "onebit": "#1f77b4", "no-ef": "#d62728"}
LABELS = {
    "adamw": "AdamW",
    "onebit": "1-bit Adam",
    "no-ef": "1-bit Adam without error feedback",
}
WIDTH, HEIGHT, MARGIN = 640, 400, 60


def runs(pool, train, seeds, steps):
    """{variant: {seed: curve}}"""
    found = {}
    for variant in VARIANTS:
        for seed in seeds:
            curve = pool.run(train, variant, seed, steps, timeout=3600.0)[0]
            found.setdefault(variant, {})[seed] = curve
            print(f"{train.__name__} {variant} seed {seed}: {curve[-1][1]:.4f}", flush=True)  # noqa: T201
    return found


def draw(results, title, y_title, path):
    """An SVG with a line a run, by hand: no plotting library is needed."""
    points = [point for curves in results.values() for curve in curves.values() for point in curve]
    last = max(step for step, _ in points)
    low, high = min(y for _, y in points), max(y for _, y in points)

    def place(step, y):
        x = MARGIN + (WIDTH - 2 * MARGIN) * step / last
        return f"{x:.1f},{MARGIN + (HEIGHT - 2 * MARGIN) * (high - y) / (high - low):.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}">',
        "<style>text { font: 12px sans-serif }</style>",
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{WIDTH / 2}" y="24" text-anchor="middle">{title}</text>',
        f'<text x="{WIDTH / 2}" y="{HEIGHT - 12}" text-anchor="middle">step</text>',
        f'<text x="14" y="{MARGIN - 14}">{y_title}</text>',
    ]
    for tick in range(5):
        y, step = low + (high - low) * tick / 4, last * tick / 4
        x_at, y_at = place(step, y).split(",")
        parts += [
            f'<path d="M{MARGIN},{y_at}H{WIDTH - MARGIN}" stroke="#dddddd"/>',
            f'<text x="{MARGIN - 6}" y="{y_at}" text-anchor="end">{y:.2f}</text>',
            f'<text x="{x_at}" y="{HEIGHT - MARGIN + 16}" text-anchor="middle">{step:.0f}</text>',
        ]
    switch = place(FROZEN_AFTER * last, low).split(",")[0]
    parts.append(
        f'<path d="M{switch},{MARGIN}V{HEIGHT - MARGIN}" stroke="#999999" stroke-dasharray="4"/>'
    )
    for row, (variant, curves) in enumerate(results.items()):
        parts += [
            f'<polyline fill="none" stroke="{COLORS[variant]}" points="'
            + " ".join(place(*point) for point in curve)
            + '"/>'
            for curve in curves.values()
        ]
        parts.append(
            f'<text x="{WIDTH - MARGIN}" y="{MARGIN + 16 * row}" text-anchor="end" '
            f'fill="{COLORS[variant]}">{LABELS[variant]}</text>'
        )
    path.write_text("\n".join([*parts, "</svg>", ""]), encoding="utf-8")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=400, help="of the byte model")
    parser.add_argument("--task", choices=["bytes", "digits"], help="draw this one alone")
    parser.add_argument("--out", type=Path, default=HERE)
    args = parser.parse_args()
    tasks = {"bytes": (train_bytes, args.steps, "tiny byte model", "validation loss, nats a byte")}
    if importlib.util.find_spec("sklearn") is not None:
        tasks["digits"] = (train_digits, 600, "digits", "held-out accuracy, percent")
    if args.task is not None and args.task not in tasks:
        parser.error(f"--task: {args.task} needs scikit-learn: pip install scikit-learn")
    pool = RankPool(2)
    try:
        for name, (train, steps, title, y_title) in tasks.items():
            if args.task not in (None, name):
                continue
            results = runs(pool, train, range(args.seeds), steps)
            draw(results, f"{title}, 2 ranks", y_title, args.out / f"onebit_{name}.svg")
            text = json.dumps(results, indent=1)
            (args.out / f"onebit_{name}.json").write_text(text + "\n", encoding="utf-8")
    finally:
        pool.close()


if __name__ == "__main__":
    main()
