"""Save at one layout, load at another: every element comes back, each written once."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from mcp_parallel.checkpoint import CheckpointError, LocalChunk, Manifest, load, save, verify
from mcp_parallel.checkpoint.exchange import all_gather_json
from mcp_parallel.checkpoint.format import DTYPE_BYTES, read_header
from mcp_parallel.checkpoint.io import write_share
from mcp_parallel.checkpoint.manifest import FILE_NAME, FileRecord
from mcp_parallel.checkpoint.planning import BoxEntry, describe, plan_save
from mcp_parallel.checkpoint.storage import DTYPE_NAMES, write_file
from mcp_parallel.layout import split_dim

META = {"step": 7, "fingerprint": "tiny", "layout": {"dp": 2}, "extra": {"sample": 112}}


def values(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Random bits of ``dtype``, NaNs and infinities included."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (size,), generator=generator)
    return raw.to(torch.uint8).view(dtype).reshape(shape)


def is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bit for bit, so that NaN equals itself."""
    raw_a, raw_b = (x.contiguous().reshape(-1).view(torch.uint8) for x in (a, b))
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(raw_a, raw_b)


def slices(name: str, whole: torch.Tensor, dim: int, parts: int) -> list[LocalChunk]:
    """``whole`` cut along ``dim`` as FSDP and DTensor cut it; tail parts may be empty."""
    chunks = []
    for index in range(parts):
        start, length = split_dim(whole.shape[dim], parts, index)
        offsets = tuple(start if d == dim else 0 for d in range(whole.dim()))
        chunks.append(LocalChunk(name, whole.narrow(dim, start, length), whole.shape, offsets))
    return chunks


def grid(name: str, whole: torch.Tensor, cuts: list[list[int]]) -> list[LocalChunk]:
    """``whole`` cut at ``cuts[dim]`` (ends included) into boxes."""
    chunks = []
    for spans in itertools.product(*(itertools.pairwise(c) for c in cuts)):
        part = whole[tuple(slice(a, b) for a, b in spans)]
        chunks.append(LocalChunk(name, part, whole.shape, tuple(a for a, _ in spans)))
    return chunks


def blank(chunks: list[LocalChunk]) -> list[LocalChunk]:
    """Destinations like ``chunks``, filled with 1 bits; every other one is not contiguous."""
    out = []
    for number, chunk in enumerate(chunks):
        ones = torch.full_like(chunk.tensor, True if chunk.tensor.dtype == torch.bool else 1)
        if number % 2 and ones.dim() > 1:
            ones = ones.transpose(0, -1).contiguous().transpose(0, -1)
        out.append(LocalChunk(chunk.name, ones, chunk.global_shape, chunk.offsets))
    return out


def save_by(folder: Path, by_rank: list[list[LocalChunk]]) -> Path:
    """Save as many ranks would, in this process: the same planning, the same writers."""
    placement = plan_save([[describe(chunk) for chunk in held] for held in by_rank])
    path = folder / "step_00000007"
    path.mkdir()
    files = {}
    for rank, held in enumerate(by_rank):
        for name, record in write_share(path, placement, held, rank).items():
            files[name] = FileRecord(*record)
    manifest = Manifest(**META, files=files, tensors=placement.tensors)
    write_file(path / FILE_NAME, manifest.encode())
    return path


def assert_loads(path: Path, wanted: list[LocalChunk]) -> None:
    targets = blank(wanted)
    load(path, targets, fingerprint="tiny")
    for target, want in zip(targets, wanted, strict=True):
        assert is_same(target.tensor, want.tensor), (want.name, want.offsets)


SHARDINGS = {
    "whole": lambda n, w: [[c] for c in slices(n, w, 0, 1)],
    "rows of 2": lambda n, w: [[c] for c in slices(n, w, 0, 2)],
    "rows of 3": lambda n, w: [[c] for c in slices(n, w, 0, 3)],
    "rows of 4, one empty": lambda n, w: [[c] for c in slices(n, w, 0, 4)],
    "columns of 2": lambda n, w: [[c] for c in slices(n, w, 1, 2)],
    "columns of 5": lambda n, w: [[c] for c in slices(n, w, 1, 5)],
    "grid of 4": lambda n, w: [[c] for c in grid(n, w, [[0, 5, 9], [0, 2, 7]])],
    "uneven grid": lambda n, w: [grid(n, w, [[0, 1, 2, 9], [0, 3, 4, 7]])],
    "replicas": lambda n, w: [[c] for c in slices(n, w, 0, 2) + slices(n, w, 0, 2)],
}


@pytest.mark.parametrize("saved", SHARDINGS)
def test_reshard(tmp_path, saved):
    """[9, 7] saved at one sharding and loaded at each."""
    whole = values((9, 7), torch.float32)
    path = save_by(tmp_path, SHARDINGS[saved]("w", whole))
    verify(path)
    for loaded in SHARDINGS.values():
        for held in loaded("w", whole):
            assert_loads(path, held)


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0), (5,), (2, 3, 4)], ids=str)
def test_every_dtype_and_shape(tmp_path, dtype, shape):
    whole = values(shape, dtype)
    zeros = (0,) * len(shape)
    path = save(tmp_path, [LocalChunk("x", whole, shape, zeros)], **META)
    assert_loads(path, [LocalChunk("x", whole, shape, zeros)])
    (shard,) = path.glob("*.safetensors")
    assert is_same(load_file(shard)["x"], whole)  # and the format is safetensors' own


def test_strided_parameters_and_manifest(tmp_path):
    """Views, transposes and parameters are saved as they look; ``extra`` comes back."""
    base = values((6, 8), torch.bfloat16)
    weight = torch.nn.Parameter(base.t()[1:5, ::2])
    path = save(tmp_path, [LocalChunk("w", weight, (4, 3), (0, 0))], **META)
    target = torch.nn.Parameter(torch.zeros(3, 4, dtype=torch.bfloat16)).t()
    manifest = load(path, [LocalChunk("w", target, (4, 3), (0, 0))], fingerprint="tiny")
    assert is_same(target.detach(), weight.detach())
    assert manifest.extra == META["extra"]
    assert manifest.layout == META["layout"]
    assert manifest.step == 7


@st.composite
def sharded(draw):
    """A tensor, two random grids of it, and holders of each box of the first."""
    shape = tuple(draw(st.lists(st.integers(1, 7), max_size=3)))
    cuts = [
        [
            sorted([0, n, *draw(st.lists(st.integers(0, n), max_size=3))])  # equal cuts: empty box
            for n in shape
        ]
        for _ in range(2)
    ]
    dtype = draw(st.sampled_from(list(DTYPE_NAMES)))
    whole = values(shape, dtype, draw(st.integers(0, 1 << 30)))
    boxes = grid("w", whole, cuts[0])
    ranks = draw(st.integers(1, 5))
    by_rank: list[list[LocalChunk]] = [[] for _ in range(ranks)]
    for box in boxes:
        for rank in draw(st.sets(st.integers(0, ranks - 1), min_size=1)):
            by_rank[rank].append(box)
    return by_rank, grid("w", whole, cuts[1])


@given(case=sharded())
@settings(max_examples=120, deadline=None)
def test_any_grid_to_any_grid(tmp_path_factory, case):
    by_rank, wanted = case
    path = save_by(tmp_path_factory.mktemp("fuzz"), by_rank)
    verify(path)
    assert_loads(path, wanted)


def entry(name: str, size: int) -> BoxEntry:
    return BoxEntry(name, "U8", (size,), (0,), (size,))


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_each_box_has_one_writer_and_bytes_are_balanced(data):
    """No rank passes the mean by more than the largest box that others could have taken.

    Unless what it alone holds is more: then it writes that and nothing else.
    """
    ranks = data.draw(st.integers(1, 6))
    sizes_st = st.lists(st.integers(1, 30), max_size=20)
    own = [data.draw(sizes_st) for _ in range(ranks)]
    shared = [entry(f"s{i}", n) for i, n in enumerate(data.draw(sizes_st))]
    plans = [
        [*(entry(f"own{rank}.{i}", n) for i, n in enumerate(own[rank])), *shared]
        for rank in range(ranks)
    ]
    placement = plan_save(plans)
    names = [[name for _, (name, _) in writes] for writes in placement.writes]
    sizes = {e.name: e.num_bytes for plan in plans for e in plan}
    assert sorted(itertools.chain(*names)) == sorted(sizes)
    mean = sum(sizes.values()) / ranks
    largest = max((e.num_bytes for e in shared), default=0)
    for rank, written in enumerate(names):
        assert {f"own{rank}.{i}" for i in range(len(own[rank]))} <= set(written)
        assert sum(sizes[n] for n in written) <= max(sum(own[rank]), mean + largest)


def test_a_rank_without_a_share_writes_no_file(tmp_path):
    whole = values((4, 4), torch.float32)
    by_rank = [[], slices("w", whole, 0, 1), slices("w", whole, 0, 1), slices("v", whole, 0, 1)]
    path = save_by(tmp_path, by_rank)
    shards = sorted(p.name for p in path.glob("*.safetensors"))
    assert shards == [f"shard_{i:05d}_of_00002.safetensors" for i in range(2)]


def disagreements():
    w = torch.zeros(4, 3)
    half = slices("w", w, 0, 2)
    return [
        ([[half[0]]], "w must be held whole by the ranks: chunks hold 6 of 12"),
        ([[half[0]], [LocalChunk("w", w[2:].double(), (4, 3), (2, 0))]], "must agree on w"),
        ([[half[0]], [LocalChunk("w", w[2:], (4, 4), (2, 0))]], "must agree on w"),
        ([half, [LocalChunk("w", w[:1], (4, 3), (0, 0))]], "must have one size"),
        ([half, [LocalChunk("w", w[:2], (4, 3), (1, 0))]], "overlap"),
        ([[LocalChunk("w", w[:0], (4, 3), (0, 0))]], "hold 0 of 12"),
    ]


@pytest.mark.parametrize(("by_rank", "message"), disagreements(), ids=range(6))
def test_what_ranks_hold_must_make_whole_tensors(by_rank, message):
    with pytest.raises(CheckpointError, match=message):
        plan_save([[describe(chunk) for chunk in held] for held in by_rank])


@pytest.mark.parametrize(
    ("chunk", "message"),
    [
        (LocalChunk("a/b", torch.zeros(2), (2,), (0,)), "name must match"),
        (LocalChunk("..", torch.zeros(2), (2,), (0,)), "name must match"),
        (LocalChunk("w", torch.zeros(2), (2,), (1,)), "inside of its global shape"),
        (LocalChunk("w", torch.zeros(2), (4,), (-1,)), "inside of its global shape"),
        (LocalChunk("w", torch.zeros(2), (2, 1), (0, 0)), "inside of its global shape"),
        (LocalChunk("w", torch.zeros(2, dtype=torch.complex64), (2,), (0,)), "dtype of w must be"),
    ],
)
def test_a_bad_chunk_is_refused_and_nothing_is_left(tmp_path, chunk, message):
    with pytest.raises(CheckpointError, match=f"^save: .*{message}"):
        save(tmp_path, [chunk], **META)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step": -1}, "step must be"),
        ({"step": 1.0}, "step must be"),
        ({"fingerprint": None}, "fingerprint must be"),
        ({"layout": [1]}, "layout must be"),
        ({"extra": {"x": float("nan")}}, "extra must be JSON"),
        ({"extra": {"x": torch.zeros(1)}}, "extra must be JSON"),
    ],
)
def test_bad_facts_are_refused(tmp_path, change, message):
    with pytest.raises(CheckpointError, match=f"^save: {message}"):
        save(tmp_path, [], **(META | change))
    assert list(tmp_path.iterdir()) == []


def test_another_model_is_refused_by_name(tmp_path):
    w = torch.zeros(4, 3)
    path = save(tmp_path, slices("w", w, 0, 1), **META)
    good = torch.ones(4, 3)
    for chunk, fingerprint, message in [
        (LocalChunk("w", good, (4, 3), (0, 0)), "large", "fingerprint is 'tiny'"),
        (LocalChunk("v", torch.ones(2), (2,), (0,)), "tiny", "it has no tensor v"),
        (LocalChunk("w", torch.ones(4, 2), (4, 2), (0, 0)), None, "w has shape"),
        (LocalChunk("w", good.double(), (4, 3), (0, 0)), None, "w has dtype F32 there, F64 here"),
        # An empty local part is checked as well.
        (LocalChunk("w", torch.ones(0, 2), (4, 2), (4, 0)), None, "w has shape"),
    ]:
        target = LocalChunk("w", good, (4, 3), (0, 0))
        with pytest.raises(CheckpointError, match=f"is of another model: .*{message}"):
            load(path, [target, chunk], fingerprint=fingerprint)
        assert torch.equal(good, torch.ones(4, 3))


# Real ranks.


def hold(rank: int, layout: str) -> list[LocalChunk]:
    """What ``rank`` of 4 holds of a small model: sharded, replicated, tied, empty and 0-d."""
    w = values((10, 6), torch.float32, 1)
    tied = values((5, 4), torch.bfloat16, 2)
    step = torch.tensor(41, dtype=torch.int64)
    dim, parts = (0, 2) if layout == "dp2tp2" else (1, 4)
    chunks = [slices("model.w", w, dim, parts)[rank % parts]]
    chunks.append(slices("optim.exp_avg.w", w * 2, 0, 4)[rank])
    if rank in (0, 3):
        chunks.append(LocalChunk("model.tied", tied, (5, 4), (0, 0)))
    chunks.append(LocalChunk("optim.step", step, (), ()))
    chunks.append(LocalChunk("a.mask", torch.tensor([True, False, True]), (3,), (0,)))
    chunks.append(slices("model.norm", values((3,), torch.float16, 3), 0, 4)[rank])
    return chunks


def save_ranks(rank, world, folder):
    refuse = mock.Mock(side_effect=AssertionError("a peer's bytes were unpickled"))
    with mock.patch.object(dist.distributed_c10d, "_unpickler", refuse):
        path = save(folder, hold(rank, "dp2tp2"), **META)
    return str(path)


def load_ranks(rank, world, path):
    wanted = hold(rank, "tp4")
    targets = blank(wanted)
    manifest = load(path, targets, fingerprint="tiny")
    assert all(is_same(t.tensor, w.tensor) for t, w in zip(targets, wanted, strict=True))
    return manifest.extra


def test_four_ranks_save_and_others_load(tmp_path, ranks):
    paths = ranks.run(save_ranks, tmp_path)
    assert set(paths) == {str(tmp_path / "step_00000007")}
    path = Path(paths[0])
    manifest = verify(path)
    assert len(manifest.files) == 4
    for shard in path.glob("*.safetensors"):
        with shard.open("rb") as file:
            for held in read_header(file, shard.stat().st_size, shard.name).values():
                assert held.start % DTYPE_BYTES[held.dtype] == 0  # may be read in place
    stored = sum(f.size_bytes for f in manifest.files.values())
    data = sum(
        DTYPE_BYTES[t.dtype] * torch.Size(t.shape).numel() for t in manifest.tensors.values()
    )
    headers = sum(int.from_bytes(p.read_bytes()[:8], "little") + 8 for p in path.glob("*.safe*"))
    assert stored == data + headers  # replicas were written once
    assert ranks.run(load_ranks, path) == [META["extra"]] * 4
    for rank in range(4):  # and one process loads what four saved
        assert_loads(path, hold(rank, "tp4"))
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000007"]


def save_differing(rank, world, folder, key, value):
    meta = META | ({key: value} if rank == world - 1 else {})
    with pytest.raises(CheckpointError) as caught:
        save(folder, slices("w", torch.zeros(6), 0, world)[rank : rank + 1], **meta)
    return str(caught.value)


def load_differing(rank, world, path, change):
    name, dtype = ("v", torch.float32) if change == "name" else ("w", torch.float64)
    last = rank == world - 1
    bad = LocalChunk(
        name if last else "w", torch.ones(6, dtype=dtype if last else None), (6,), (0,)
    )
    good = LocalChunk("w", torch.ones(6), (6,), (0,))
    with pytest.raises(CheckpointError) as caught:
        load(path, [good, bad], fingerprint=None)
    assert torch.equal(good.tensor, torch.ones(6)), "loaded in part"
    return str(caught.value)


def test_ranks_that_differ_all_get_the_same_error(tmp_path, ranks):
    for key, value in [("step", 8), ("fingerprint", "x"), ("layout", {"dp": 9})]:
        messages = ranks.run(save_differing, tmp_path, key, value, ranks=3)
        assert len(set(messages)) == 1
        assert "must be the same on all ranks" in messages[0]
        assert list(tmp_path.iterdir()) == []
    messages = ranks.run(save_differing, tmp_path, "extra", {"x": {1, 2}}, ranks=3)
    assert len(set(messages)) == 1
    assert "(rank 2 of 3)" in messages[0]
    path = save(tmp_path, slices("w", torch.zeros(6), 0, 1), **META)
    for change in ("name", "dtype"):
        messages = ranks.run(load_differing, path, change, ranks=3)
        assert len(set(messages)) == 1
        assert "is of another model" in messages[0]
        assert "(rank 2 of 3)" in messages[0]


def gather(rank, world):
    return all_gather_json({"rank": rank, "text": "é" * (rank * 1000), "none": None})


def test_ranks_exchange_json_of_any_length(ranks):
    expected = [{"rank": r, "text": "é" * (r * 1000), "none": None} for r in range(4)]
    assert ranks.run(gather) == [expected] * 4
    assert all_gather_json([1]) == [[1]]
    assert json.dumps(all_gather_json({})) == "[{}]"
