"""Peak memory of a rank on one model, rung by rung, tracked and predicted.

    python bench/memory_ladder.py            # the table, about a minute and a half on two cores
    python bench/memory_ladder.py --write    # also docs/memory.md
    python bench/memory_ladder.py --estimates  # the estimator beside the tracker, layout by layout

The reference is a field report: 78 GB a GPU, 42 with checkpointing, 23 with ZeRO-3 on top, 15 with
compressed activations on top, -81 %. The model is shaped like it: 24 layers, and about half of the
plain run's peak is activations. Ratios are what is compared; this machine has no 78 GB.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the tracker is torch's profiler, which chats

from mcp_parallel.check import check
from mcp_parallel.config import Config
from mcp_parallel.layout import Layout
from mcp_parallel.memory.estimate import estimate
from mcp_parallel.memory.measure import measure_peaks

DOCS = Path(__file__).resolve().parent.parent / "docs" / "memory.md"
FIELD_GB = (78, 42, 23, 15)
MIB = 2**20

MODEL = {
    "preset": None,
    "num_layers": 24,
    "hidden_size": 128,
    "num_heads": 4,
    "num_kv_heads": 2,
    "ffn_size": 352,
    "vocab_size": 512,
    "seq_len": 192,
}
TRAIN = {"global_batch_size": 8, "micro_batch_size": 2}

SELECTIVE = "memory.activation_checkpointing=selective"
FULL = "memory.activation_checkpointing=full"
INT8 = "memory.activation_compression=int8"
ZERO3 = "parallel.zero=3"
OFFLOAD = "memory.offload=true"
HALVES = "train.micro_batch_size=1"
ONEBIT = ["train.optimizer=onebit_adam", "train.freeze_step=1", "train.warmup_steps=0"]

RUNGS: dict[str, list[str]] = {
    "plain dp4": [],
    "selective checkpointing": [SELECTIVE],
    "full checkpointing": [FULL],
    "ZeRO-1": ["parallel.zero=1"],
    "ZeRO-2": ["parallel.zero=2"],
    "ZeRO-3": [ZERO3],
    "compression bf16": ["memory.activation_compression=bf16"],
    "compression int8": [INT8],
    "compression fp8": ["memory.activation_compression=fp8"],
    "selective + int8": [SELECTIVE, INT8],
    "offload": [OFFLOAD],
    "2 micro-batches": [HALVES],
    "full + ZeRO-3": [FULL, ZERO3],
    "full + ZeRO-3 + int8": [FULL, ZERO3, INT8],
    "selective + ZeRO-3 + int8": [SELECTIVE, ZERO3, INT8],
    "full + ZeRO-3 + int8 + offload": [FULL, ZERO3, INT8, OFFLOAD],
    "all of these, 2 micro-batches": [FULL, ZERO3, INT8, OFFLOAD, HALVES],
}
SEQUENCE = ("plain dp4", "full checkpointing", "full + ZeRO-3", "full + ZeRO-3 + int8")

# Small, so that all of them are quick: what counts is that no part is left out.
SMALL = {**MODEL, "num_layers": 4, "seq_len": 128}
LAYOUTS: list[list[str]] = [
    [],
    [SELECTIVE],
    [FULL, "memory.activation_compression=fp8"],
    ["memory.activation_compression=bf16"],
    ["parallel.dp=2"],
    ["parallel.dp=2", "parallel.zero=1", SELECTIVE],
    ["parallel.dp=2", "parallel.zero=2", INT8],
    ["parallel.dp=4", ZERO3],
    ["parallel.tp=2"],
    ["parallel.tp=2", "parallel.sequence_parallel=false", FULL],
    ["parallel.pp=2"],
    ["parallel.pp=2", "parallel.schedule=gpipe", SELECTIVE],
    ["parallel.pp=2", "parallel.schedule=interleaved", "parallel.virtual_stages=2"],
    ["parallel.pp=2", "parallel.schedule=zero_bubble"],
    ["parallel.pp=2", "parallel.schedule=zbv", INT8],
    ["parallel.tp=2", "parallel.pp=2", "parallel.schedule=dualpipev", FULL],
    ["parallel.dp=2", "parallel.pp=2", "parallel.zero=1"],
    ["parallel.dp=2", "parallel.tp=2", ZERO3, SELECTIVE],
    ["parallel.cp=2"],
    ["parallel.cp=4", "parallel.cp_attention=ring"],
    ["parallel.cp=2", "parallel.tp=2", ZERO3, FULL],
    ["parallel.dp=4", "parallel.dp_replicate=2", "parallel.zero=2", HALVES],
    ["parallel.dp=4", "parallel.dp_replicate=2", ZERO3],
    ["parallel.pp=2", "parallel.schedule=zero_bubble", FULL],
    [*ONEBIT, "parallel.dp=2"],
    [*ONEBIT, "parallel.dp=2", "parallel.zero=1"],
    [*ONEBIT, "train.precision=bf16", "parallel.dp=2"],
    [*ONEBIT],
]
# A vision transformer on images of 64 patches, in each kind of layout.
IMAGES = {"preset": "vit-digits", "patch_size": 1}
IMAGE_TRAIN = {"global_batch_size": 16, "micro_batch_size": 4}
IMAGE_LAYOUTS: list[list[str]] = [
    [],
    [SELECTIVE, INT8],
    [FULL, "memory.activation_compression=fp8"],
    ["train.precision=bf16"],
    ["train.precision=fp16", FULL],
    [OFFLOAD],
    [OFFLOAD, "train.precision=bf16"],
    ["parallel.dp=2", "parallel.zero=1"],
    ["parallel.dp=2", "parallel.zero=2", "train.precision=bf16"],
    ["parallel.dp=2", ZERO3, FULL],
    ["parallel.tp=2", SELECTIVE],
    ["parallel.tp=2", "parallel.sequence_parallel=false"],
    ["parallel.pp=2"],
    ["parallel.pp=2", "parallel.schedule=gpipe"],
    ["parallel.pp=2", "parallel.schedule=interleaved", "parallel.virtual_stages=2"],
    ["parallel.pp=2", "parallel.schedule=zero_bubble"],
    ["parallel.pp=2", "parallel.schedule=zbv", FULL],
    ["parallel.tp=2", "parallel.pp=2", "parallel.schedule=dualpipev"],
    ["parallel.cp=4"],
    ["parallel.cp=2", "parallel.tp=2", "parallel.cp_attention=ring"],
    ["parallel.cp=2", "parallel.tp=2", ZERO3, FULL],
    [*ONEBIT, "parallel.dp=2"],
]


@dataclass(frozen=True)
class Rung:
    """One configuration, tracked and predicted; bytes of the rank that takes most."""

    name: str
    tracked: int
    predicted: int
    parts: dict[str, int]

    @property
    def error(self) -> float:
        return self.predicted / self.tracked - 1


def run(name: str, base: Config, changes: list[str]) -> Rung:
    config = base.with_overrides(changes)
    check(config)
    parallel = config.parallel
    estimates = [estimate(config, pp_rank) for pp_rank in range(parallel.pp)]
    peaks = measure_peaks(config, steps=2 if config.train.optimizer == "adamw" else 3)
    # The worst rank of each place of the pipeline; the prediction that is furthest off counts.
    layout = Layout.from_config(parallel)
    places = [0] * parallel.pp
    for rank, peak in enumerate(peaks):
        place = layout.coordinate(rank).pp
        places[place] = max(places[place], peak)
    pairs = list(zip(places, estimates, strict=True))
    tracked, predicted = max(pairs, key=lambda pair: abs(pair[1].peak_bytes / pair[0] - 1))
    if name:  # the ladder: what a rank needs
        tracked, predicted = max(pairs, key=lambda pair: pair[0])
    return Rung(name or " ".join(changes) or "one rank", tracked, predicted.peak_bytes,
                predicted.parts)  # fmt: skip


def ladder() -> list[Rung]:
    base = Config.from_mapping({"model": MODEL, "train": TRAIN, "parallel": {"dp": 4}})
    return [run(name, base, changes) for name, changes in RUNGS.items()]


def compare_estimates() -> list[Rung]:
    base = Config.from_mapping({"model": SMALL, "train": TRAIN})
    images = Config.from_mapping({"model": IMAGES, "train": {**IMAGE_TRAIN, "precision": "fp32"}})
    rungs = [run("", base, changes) for changes in LAYOUTS]
    for changes in IMAGE_LAYOUTS:
        rung = run("", images, changes)
        rungs.append(replace(rung, name=f"images: {rung.name}"))
    return rungs


def table(rungs: list[Rung], width: int = 34) -> list[str]:
    plain = rungs[0].tracked
    lines = [
        f"| {'rung':{width}} | tracked MiB | of plain | predicted MiB | off |",
        f"| {'-' * width} | ----------: | -------: | ------------: | --: |",
    ]
    lines += [
        f"| {r.name:{width}} | {r.tracked / MIB:11.1f} | {r.tracked / plain:8.3f} "
        f"| {r.predicted / MIB:13.1f} | {r.error:+.1%} |"
        for r in rungs
    ]
    return lines


def sequence(rungs: list[Rung]) -> list[str]:
    """The field report's way down beside ours, as ratios."""
    by_name = {rung.name: rung for rung in rungs}
    lines = ["| step | field report | of plain | ours, of plain |", "| --- | ---: | ---: | ---: |"]
    for name, field in zip(SEQUENCE, FIELD_GB, strict=True):
        ours = by_name[name].tracked / by_name[SEQUENCE[0]].tracked
        lines.append(f"| {name} | {field} GB | {field / FIELD_GB[0]:.3f} | {ours:.3f} |")
    return lines


def shares(rung: Rung) -> str:
    total = sum(rung.parts.values())
    parts = sorted(rung.parts.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {size / total:.0%}" for name, size in parts if size)


def document(rungs: list[Rung]) -> str:
    text = DOCS.read_text(encoding="ascii")
    head, _, rest = text.partition("<!-- ladder -->\n")
    _, _, tail = rest.partition("<!-- end of ladder -->")
    body = [*table(rungs), "", f"Plain, by part: {shares(rungs[0])}.", "", *sequence(rungs), ""]
    return "\n".join([f"{head}<!-- ladder -->", *body, f"<!-- end of ladder -->{tail}"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="write docs/memory.md")
    parser.add_argument("--estimates", action="store_true", help="estimator beside tracker")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    rungs = compare_estimates() if args.estimates else ladder()
    if args.json:
        rows = [{"name": r.name, "tracked": r.tracked, "predicted": r.predicted} for r in rungs]
        sys.stdout.write(json.dumps(rows) + "\n")
    elif args.estimates:
        sys.stdout.write("\n".join(table(rungs, 90)) + "\n")
    else:
        sys.stdout.write("\n".join([*table(rungs), "", *sequence(rungs)]) + "\n")
    worst = max(rungs, key=lambda r: abs(r.error))
    sys.stdout.write(f"\nplain by part: {shares(rungs[0])}\n" if not args.json else "")
    sys.stderr.write(f"estimates are off by {abs(worst.error):.1%} at most ({worst.name})\n")
    if args.write:
        DOCS.write_text(document(rungs), encoding="ascii")
    return 0


if __name__ == "__main__":
    sys.exit(main())
