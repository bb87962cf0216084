"""Every layout trains alike, and the proof of it goes red when a layout is broken on purpose."""

import json
import subprocess
import sys

import pytest
import torch

from mcp_parallel.config import Config
from mcp_parallel.parity.cases import MATRIX
from mcp_parallel.parity.measure import Measurement
from mcp_parallel.parity.run import format_row
from mcp_parallel.parity.verdict import TOLERANCE, judge
from mcp_parallel.schedules.build import SCHEDULES

# Each mutation is one line that somebody could forget; its case must fall out of tolerance.
MUTATIONS = {
    "stage left out of the norm": ("pp2 1f1b", "grad_norm_diff"),
    "replica counted twice in the norm": ("tp2", "grad_norm_diff"),
    "tied embedding not summed": ("tied pp2", "update_diff"),
    "tied embedding not summed in a V": ("tied pp2 zbv", "update_diff"),
    "token weighting dropped": ("padded dp4", "loss_diff"),
    "token weighting dropped in the pipeline": ("padded pp2", "loss_diff"),
    "norm weights not summed over tp": ("tp2", "update_diff"),
    "data-parallel sum forgotten": ("dp2", "grad_norm_diff"),
    "last layer lost": ("5-layers pp2", "loss_diff"),
    "gradients not summed over cp": ("cp2", "grad_norm_diff"),
    "positions not split over cp": ("cp2", "loss_diff"),
    "chunks in the order of ranks": ("cp2 all_gather", "loss_diff"),
    "parts joined without their weights": ("documents cp2", "loss_diff"),
    "key gradients kept by the rank that made them": ("cp2", "update_diff"),
    "key gradients of a document forgotten": ("documents cp2", "update_diff"),
    "the mean's gradient not summed over cp": ("vit cp2", "update_diff"),
    "the same positions on every rank of cp": ("vit cp2", "loss_diff"),
    "moments not restored": ("resume zero3 to tp2", "update_diff"),
    "replicas not summed": ("hsdp2x2 zero3", "grad_norm_diff"),
}

SCRIPT = r"""
import dataclasses, io, json, sys, unittest.mock as mock
import torch, torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
torch.set_num_threads(1)
from mcp_parallel import step
from mcp_parallel.context import attention, block, ring, split
from mcp_parallel.config import Config
from mcp_parallel.data.corpus import open_corpus
from mcp_parallel.launch.local import launch_local
from mcp_parallel.layout import Layout
from mcp_parallel.model import vit
from mcp_parallel.model.loss import IGNORED
from mcp_parallel.optim import adamw
from mcp_parallel.parallel import gradients, parallelize
from mcp_parallel.parity.cases import MATRIX
from mcp_parallel.parity.run import run_matrix

base = Config.from_mapping({"model": {
    "preset": None, "num_layers": 4, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 4,
    "ffn_size": 48, "vocab_size": 256, "seq_len": 32}})
corpus = open_corpus(base.data, base.model)
square_sum = adamw.local_square_sum
all_reduce = FSDPModule.set_requires_all_reduce

def first_rank_only(shards):
    return square_sum(shards) if dist.get_rank() == 0 else 0 * square_sum(shards)

def counted_everywhere(shards):
    return square_sum([dataclasses.replace(s, counted_here=True) for s in shards])

def mean_of_means(self, output, targets):
    parts = self.config.train.global_batch_size // self.config.train.micro_batch_size
    return self._stage_loss(output, targets, 1 / int((targets != IGNORED).sum()) / parts)

class NoSum(gradients.GradientBuckets):
    def _launch(self):
        self._works.append(mock.Mock())

def own_gradients(dout, saved, split, group, documents=(), *, causal=True):
    q, k, v, out, lse = saved
    results = block.results_of(dout, out, lse)
    step = next(iter(ring.steps_of(split)))
    return block.attend_block_backward(q, k, v, results, causal=True, bounds=step.bounds)

def joined_by_halves(total, lse, part, part_lse):
    total.add_(part).div_(2)

def arrived_and_forgotten(self):
    if self._behind is not None:
        self._behind.finish()
    self._behind = None

def in_order(self, gathered):
    return gathered

def lose_last(config):
    num_stages = Layout.from_config(config.parallel).num_stages
    each = config.model.num_layers // num_stages
    return [range(i * each, (i + 1) * each) for i in range(num_stages)]

MUTANTS = {
    "stage left out of the norm": (adamw, "local_square_sum", first_rank_only),
    "replica counted twice in the norm": (adamw, "local_square_sum", counted_everywhere),
    "tied embedding not summed": (gradients, "sum_tied", lambda grads, mesh: None),
    "tied embedding not summed in a V": (gradients, "sum_tied", lambda grads, mesh: None),
    "token weighting dropped": (step.TrainingStep, "_loss", mean_of_means),
    "token weighting dropped in the pipeline": (step.TrainingStep, "_loss", mean_of_means),
    "norm weights not summed over tp": (gradients, "sum_over_group", lambda tensors, group: None),
    "data-parallel sum forgotten": (gradients, "GradientBuckets", NoSum),
    "last layer lost": (parallelize, "stage_layers", lose_last),
    "gradients not summed over cp": (gradients, "GradientBuckets", NoSum),
    "positions not split over cp": (attention.ContextAttention, "starts", (0, 8)),
    "chunks in the order of ranks": (split.Split, "order", in_order),
    "parts joined without their weights": (ring, "_merge", joined_by_halves),
    "key gradients kept by the rank that made them": (
        attention, "_BACKWARD", {"ring": own_gradients}),
    "key gradients of a document forgotten": (ring._DirectSums, "_take", arrived_and_forgotten),
    "the mean's gradient not summed over cp": (vit, "copy_to_group", lambda x, group: x),
    "the same positions on every rank of cp": (vit.PatchEmbedding, "_own_positions",
        lambda self, length: self.positions[:length]),
}
MUTANTS |= {
    "moments not restored": (adamw.AdamW, "chunks_to_load", lambda self, manifest: []),
    "replicas not summed": (
        FSDPModule, "set_requires_all_reduce", lambda self, _: all_reduce(self, False)),
}
wanted = json.loads(sys.argv[1])
by_name = {case.name: case for case in MATRIX}

def run(name, context):
    # One worker set for all runs: what is broken is broken in each of its ranks, and mended after.
    sys.stdout = io.StringIO()
    run_matrix(base, corpus, context, [by_name[name]], ["fp64"], as_json=True)
    return sys.stdout.getvalue()

def entry(context):
    results = {name: run(name, context) for name in sorted(set(wanted.values()))}
    for mutation, case in wanted.items():
        with mock.patch.object(*MUTANTS[mutation]):
            results[mutation] = run(case, context)
    if context.rank == 0:
        with open(sys.argv[2], "w") as file:
            json.dump({name: json.loads(text) for name, text in results.items()}, file)
    return 0

sys.exit(launch_local(entry, max(by_name[name].layout.world_size for name in wanted.values())))
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    wanted = {mutation: case for mutation, (case, _) in MUTATIONS.items()}
    file = tmp_path_factory.mktemp("parity") / "results.json"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT, json.dumps(wanted), str(file)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(file.read_text())


@pytest.mark.parametrize("case", sorted({case for case, _ in MUTATIONS.values()}))
def test_unbroken_layouts_pass(results, case):
    assert results[case]["ok"], results[case]


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_broken_layout_is_found(results, mutation):
    _case, figure = MUTATIONS[mutation]
    result = results[mutation]
    assert not result["ok"], result
    [row] = result["rows"]
    limits = {"loss_diff": "loss", "grad_norm_diff": "grad_norm", "update_diff": "update"}
    # Far outside, so that a matrix with looser bounds would see it too.
    assert row[figure] > 1e3 * getattr(TOLERANCE["fp64"], limits[figure]), row


@pytest.mark.parametrize(
    "scales, norms, passes",
    [
        ([8.0, 4.0], [float("inf"), 2.0], True),
        ([8.0, 8.0], [float("inf"), 2.0], False),  # skipped alike, but another scale
        ([8.0, 4.0], [2.0, 2.0], False),  # this layout did not skip
        ([8.0, 4.0], [float("inf"), 2.01], False),
    ],
)
def test_loss_scales_and_skipped_steps_must_be_alike(scales, norms, passes):
    update = {"a": torch.ones(2)}
    reference = Measurement([3.0, 2.0], [float("inf"), 2.0], [8.0, 4.0], update)
    row = judge("case", "fp16", Measurement([3.0, 2.0], norms, scales, update), reference)
    assert row.passed == passes
    assert ("loss scales differ" in format_row(row)) == (scales != reference.loss_scales)


def test_matrix_holds_what_was_promised():
    names = {case.name for case in MATRIX}
    assert len(names) == len(MATRIX) >= 30
    layouts = [case.layout for case in MATRIX]
    assert {layout.zero for layout in layouts} == {0, 1, 2, 3}
    assert {layout.cp for layout in layouts} >= {1, 2, 4}
    assert {layout.schedule for layout in layouts} == set(SCHEDULES)
    assert {"tied", "odd-vocab", "5-layers", "padded", "clipped", "documents"} <= {
        case.variation.name for case in MATRIX
    }


@pytest.mark.parametrize("case", MATRIX, ids=lambda case: case.name)
def test_every_case_is_a_legal_configuration(case):
    from mcp_parallel.check import check

    for precision in case.precisions:
        for leg, _ in case.legs():
            check(leg.configure(Config(), precision))


# Two minutes of both cores; where others share them, longer than most tests may take.
MATRIX_S = 1500


# A difference that float32 shows is in float64 too, a billion times clearer: float32 is run for
# its own tolerance alone, which is half of the time.
@pytest.mark.timeout(MATRIX_S + 100)
@pytest.mark.parametrize(
    "precisions",
    [("fp64", "bf16", "fp16"), pytest.param(("fp32",), marks=pytest.mark.slow)],
    ids="+".join,
)
def test_the_command_runs_the_whole_matrix(precisions):
    command = [sys.executable, "-W", "ignore", "-m", "mcp_parallel", "parity", "--json"]
    for precision in precisions:
        command += ["--precision", precision]
    done = subprocess.run(command, capture_output=True, text=True, timeout=MATRIX_S)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["ok"]
    assert {(row["case"], row["precision"]) for row in report["rows"]} == {
        (case.name, precision)
        for case in MATRIX
        for precision in case.precisions
        if precision in precisions
    }


def test_rows_are_listed_and_picked_by_pattern(capsys):
    from mcp_parallel.cli.main import main

    assert main(["parity", "--list", "--case", "resume*", "--case", "dp2", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    names = [case.name for case in MATRIX if case.name.startswith("resume") or case.name == "dp2"]
    assert list(listed) == names
    assert listed["dp2"] == ["fp64", "fp32"]
    assert main(["parity", "--list", "--precision", "bf16"]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert len(rows) == sum("bf16" in case.precisions for case in MATRIX)


def test_a_model_that_does_not_fit_is_refused_with_one_that_does(capsys):
    from mcp_parallel.cli.main import main

    assert main(["parity", "--preset", "405b"]) == 2
    message = capsys.readouterr().err
    assert "405b" in message
    assert "use tiny" in message
    assert main(["parity", "--case", "dp3"]) == 2
    assert "'dp3'" in capsys.readouterr().err
