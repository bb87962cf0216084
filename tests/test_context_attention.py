"""Attention over a sequence that ranks share equals attention over it on one process."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist

from mcp_kernels.saved import is_exact
from mcp_parallel.context.attention import ContextAttention
from mcp_parallel.context.documents import (
    NOTHING,
    gather_bounds,
    ring_bounds,
    ring_documents,
    triangle_bounds,
)
from mcp_parallel.context.ring import steps_of
from mcp_parallel.context.split import Split
from mcp_parallel.memory.track import AllocationTracker

KINDS = ["ring", "all_gather"]
EPS = 2**-52


def make(batch, length, heads, kv_heads, size, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, length, heads, size), *[(batch, length, kv_heads, size)] * 2]
    shapes.append(shapes[0])
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes]


def random_documents(batch, length, seed):
    """Documents of very different lengths, one of them often longer than all chunks."""
    rng = random.Random(seed)
    rows = []
    for _ in range(batch):
        share = rng.choice([0.02, 0.1, 0.5, 1.0])
        first, row = 0, []
        for position in range(length):
            first = position if position and rng.random() < share else first
            row.append(first)
        rows.append(row)
    return torch.tensor(rows)


def dense(q, k, v, dout, documents=None, *, causal=True):
    """(out, dq, dk, dv) by a dense mask and autograd, in float64."""
    q, k, v = (t.double().requires_grad_() for t in (q, k, v))
    length, group = q.shape[1], q.shape[2] // k.shape[2]
    wide_k, wide_v = (t.repeat_interleave(group, 2) for t in (k, v))
    position = torch.arange(length)
    sees = (position[:, None] >= position)[None] if causal else torch.ones(1, length, length) > 0
    if documents is not None:
        sees = sees & (position >= documents[:, :, None])
    scores = torch.einsum("bihd,bjhd->bhij", q, wide_k) * q.shape[-1] ** -0.5
    p = scores.masked_fill(~sees[:, None], -torch.inf).softmax(-1)
    out = torch.einsum("bhij,bjhd->bihd", p, wide_v)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout.double())]


def run_shared(rank, world, kind, cases, causal=True):
    """(out, dq, dk, dv) of this rank's part, case by case."""
    group = dist.new_group(list(range(world)))  # the name of a group of its own, as the trainer's
    results = []
    for sizes, document_seed, dtype in cases:
        q, k, v, dout = make(*sizes, dtype=dtype)
        split = Split(world, rank, sizes[1])
        attend = ContextAttention(split, group, kind, causal=causal)
        mine = [split.take(t).requires_grad_() for t in (q, k, v)]
        plan = ()
        if document_seed is not None:
            plan = attend.plan(random_documents(sizes[0], sizes[1], document_seed), q.device)
        out = attend(*mine, plan)
        out.backward(split.take(dout))
        results.append([out.detach(), *(t.grad for t in mine)])
    return results


def whole(parts, length):
    """The sequence from every rank's part."""
    return Split(len(parts), 0, length).order(torch.cat(parts, 1))


# (batch, positions, heads, KV heads, head size): chunks of odd lengths, of one position, and of
# more than a tile of the kernel; groups of 1, 2 and 4 heads.
def sizes_for(world):
    unit = 2 * world
    return [
        (2, unit * 5, 4, 2, 8),
        (1, unit, 2, 2, 4),
        (3, unit * 7, 4, 1, 6),
        (1, unit * 70, 2, 1, 16),
    ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_equals_one_process(ranks, world, kind):
    cases = [(s, None, torch.float64) for s in sizes_for(world)]
    # Fuzz: the first sizes again, with documents drawn anew each time, then the long sequence.
    cases += [(s, seed, torch.float64) for seed in range(5) for s in sizes_for(world)[:3:2]]
    cases += [(sizes_for(world)[3], seed, torch.float64) for seed in (11, 12)]
    assert_equal(ranks.run(run_shared, kind, cases, ranks=world), cases)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", [2, 3])
def test_rows_that_see_all_keys_equal_one_process(ranks, world, kind):
    cases = [(s, None, torch.float64) for s in sizes_for(world)]
    assert_equal(ranks.run(run_shared, kind, cases, False, ranks=world), cases, causal=False)


def assert_equal(results, cases, *, causal=True):
    """Every rank's parts are those of ``dense``."""
    for index, (sizes, seed, _) in enumerate(cases):
        documents = None if seed is None else random_documents(sizes[0], sizes[1], seed)
        wanted = dense(*make(*sizes), documents, causal=causal)
        for name, part, want in zip(
            ("out", "dq", "dk", "dv"),
            zip(*(r[index] for r in results), strict=True),
            wanted,
            strict=True,
        ):
            got = whole(list(part), sizes[1])
            # A result is a sum of at most S terms, each after at most as many sums again (scores,
            # softmax), whose values are below 8: S roundings of it, twice.
            bound = 2 * sizes[1] * EPS * 8
            assert (got - want).abs().max() <= bound, (name, sizes, seed)


@pytest.mark.parametrize("kind", KINDS)
def test_sixteen_bits_lose_no_more_than_one_process(ranks, kind):
    """Parts are rounded before they are joined: one rounding more than attention in one piece."""
    sizes, dtype = (2, 4 * 2 * 33, 4, 2, 16), torch.bfloat16
    cases = [(sizes, None, dtype), (sizes, 3, dtype)]
    results = ranks.run(run_shared, kind, cases)
    for index, (_, seed, _) in enumerate(cases):
        documents = None if seed is None else random_documents(sizes[0], sizes[1], seed)
        wanted = dense(*make(*sizes, dtype=dtype), documents)
        for part, want in zip(zip(*(r[index] for r in results), strict=True), wanted, strict=True):
            got = whole(list(part), sizes[1]).double()
            # Roundings in a row, each 2^-9 of its value: q, P, out and its parts forward; dS and
            # the sum of parts backward.
            assert (got - want).norm() / want.norm() <= 6 * 2**-9


def test_gradients_check_themselves(ranks):
    """d out / d k of other ranks' keys is there: without it the sum over ranks would be short."""
    [[parts]] = ranks.run(run_shared, "ring", [((1, 8, 1, 1, 4), None, torch.float64)], ranks=1)
    results = ranks.run(run_shared, "ring", [((1, 8, 1, 1, 4), None, torch.float64)], ranks=4)
    dk = whole([r[0][2] for r in results], 8)
    torch.testing.assert_close(dk, parts[2], rtol=0, atol=64 * EPS)


def run_saved(rank, world, kind):
    """(shape, whether it must come back bit for bit) of what waits for backward."""
    split = Split(world, rank, 12)
    attend = ContextAttention(split, dist.new_group(list(range(world))), kind)
    q, k, v, _ = (split.take(t).requires_grad_() for t in make(1, 12, 4, 2, 8))
    saved = []

    def pack(x):
        saved.append((tuple(x.shape), is_exact(x)))
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        attend(q, k, v).sum()
    return saved


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_lse_must_wait_bit_for_bit(ranks, kind):
    """An error of it would be one of every probability of its row. No other rank's keys wait."""
    kept = {((1, 6, 4, 8), False), ((1, 6, 2, 8), False), ((1, 4, 6), True)}
    for saved in ranks.run(run_saved, kind, ranks=2):
        assert set(saved) == kept
        assert len(saved) == 5  # q, k, v, out and lse


def run_tracked(rank, world):
    """Most bytes that ring attention's forward and its backward take beyond their inputs."""
    length = 2 * world * 64
    split = Split(world, rank, length)
    attend = ContextAttention(split, dist.new_group(list(range(world))), "ring")
    q, k, v, dout = (split.take(t).requires_grad_() for t in make(1, length, 2, 2, 32))
    attend(q, k, v).backward(dout)  # connects the ranks
    with AllocationTracker() as forward:
        out = attend(q, k, v)
    with AllocationTracker() as backward:
        out.backward(dout)
    return forward.peak_bytes, backward.peak_bytes


def test_blocks_do_not_pile_up(ranks):
    """Each rank has the same rows and keys of its own: more ranks must not mean more memory."""
    three, four = (
        [max(peaks) for peaks in zip(*ranks.run(run_tracked, ranks=n), strict=True)] for n in (3, 4)
    )
    block_bytes = 2 * 2 * 64 * 2 * 32 * 8  # keys and values of a rank
    for few, many in zip(three, four, strict=True):
        assert many - few < block_bytes // 2


# --- the split, on paper --------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2, 3, 4, 7])
def test_every_rank_has_as_much_to_do(world):
    """(row, key) pairs of each step's causal work: equal on all ranks, and none is done twice."""
    length = 2 * world * 3
    done = torch.zeros(length, length, dtype=torch.int64)
    work = []
    for rank in range(world):
        split = Split(world, rank, length)
        positions = split.take(torch.arange(length)[None])[0]
        pairs = []
        for index, step in enumerate(steps_of(split)):
            source = Split(world, (rank - index) % world, length)
            rows = positions[step.rows]
            keys = source.take(torch.arange(length)[None])[0][step.keys]
            sees = torch.ones(len(rows), len(keys), dtype=torch.bool)
            if step.causal:
                sees = torch.ones_like(sees).tril()
            done[rows[:, None].expand_as(sees)[sees], keys[None].expand_as(sees)[sees]] += 1
            pairs.append(int(sees.sum()))
        work.append(pairs)
    assert torch.equal(done, torch.ones_like(done).tril())
    assert all(pairs == work[0] for pairs in work)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("seed", range(4))
def test_bounds_are_the_pairs_of_the_mask(world, seed):
    """Every (row, key) pair that documents leave is met once, and no other."""
    length, batch = 2 * world * 5, 2
    documents = random_documents(batch, length, seed)
    position = torch.arange(length)
    sees = (position[:, None] >= position) & (position >= documents[:, :, None])
    for kind in KINDS:
        done = torch.zeros(batch, length, length, dtype=torch.int64)
        for rank in range(world):
            split = Split(world, rank, length)
            mine = split.take(position[None])[0]
            for rows, keys, bounds, causal in _calls(kind, split, documents, mine):
                _meet(done, rows, keys, bounds, causal)
        assert torch.equal(done, sees.long())


def _calls(kind, split, documents, mine):
    """(positions of rows, positions of keys, bounds, causal) of every call of a rank."""
    if kind == "all_gather":
        for index, bounds in enumerate(gather_bounds(documents, split)):
            rows = mine[index * split.chunk_len :][: split.chunk_len]
            yield rows, torch.arange(split.seq_len), bounds, True
        return
    for index, bounds in enumerate(ring_bounds(documents, split)):
        source = Split(split.ranks, (split.rank - index) % split.ranks, split.seq_len)
        yield mine, source.take(torch.arange(split.seq_len)[None])[0], bounds, index == 0


def _meet(done, rows, keys, bounds, causal):
    batch = done.shape[0]
    sample = torch.arange(batch)[:, None]
    row_places = torch.stack([sample.expand(-1, len(rows)), rows.expand(batch, -1)], -1).view(-1, 2)
    key_places = torch.stack([sample.expand(-1, len(keys)), keys.expand(batch, -1)], -1).view(-1, 2)
    for start, stop, first, last in zip(
        bounds.rows[:-1].tolist(),
        bounds.rows[1:].tolist(),
        bounds.keys[:-1].tolist(),
        bounds.keys[1:].tolist(),
        strict=True,
    ):
        for i in range(start, stop):
            for j in range(first, last):
                if causal and j - first > i - start + (last - first) - (stop - start):
                    continue
                (b, row), (other, key) = row_places[i].tolist(), key_places[j].tolist()
                assert b == other
                done[b, row, key] += 1


def test_a_block_that_shares_no_document_is_skipped():
    documents = torch.arange(8)[None] // 2 * 2  # cut at every chunk of two ranks
    for rank in range(2):
        split = Split(2, rank, 8)
        assert ring_bounds(documents, split)[1] is NOTHING
        assert [step is None for step in steps_of(split, ring_bounds(documents, split))] == [
            False,
            True,
        ]


@pytest.mark.parametrize("seed", range(4))
def test_owner_and_receiver_agree_on_what_is_sent(seed):
    """A block is sent to whoever has rows that see it, and to nobody else."""
    world, length = 4, 2 * 4 * 3
    documents = random_documents(2, length, seed)
    plans = [ring_documents(documents, Split(world, rank, length)) for rank in range(world)]
    for rank, plan in enumerate(plans):
        for step in range(1, world):
            receiver = plans[(rank + step) % world]
            assert plan.is_wanted[step] == (receiver.bounds[step] is not NOTHING)


class CountingGroup:
    """A group that counts the elements that this rank sends."""

    def __init__(self, group):
        self._group, self.sent = group, 0

    def send(self, tensors, peer, tag):
        self.sent += sum(t.numel() for t in tensors)
        return self._group.send(tensors, peer, tag)

    def recv(self, tensors, peer, tag):
        return self._group.recv(tensors, peer, tag)


def run_counted(rank, world, documents):
    """Elements sent forward and backward, in blocks of keys and values."""
    split = Split(world, rank, documents.shape[1])
    group = CountingGroup(dist.new_group(list(range(world))))
    attend = ContextAttention(split, group, "ring")
    q, k, v, dout = (split.take(t).requires_grad_() for t in make(1, documents.shape[1], 2, 2, 4))
    attend(q, k, v, attend.plan(documents, q.device)).backward(dout)
    return group.sent / (2 * k.numel())


def test_blocks_travel_only_to_ranks_that_share_a_document(ranks):
    """Of four ranks, chunks of 2 positions: rank 0 holds 0 1 14 15, rank 1 holds 2 3 12 13, ..."""
    cut = torch.arange(16)[None] // 2 * 2  # no document reaches into another chunk
    assert ranks.run(run_counted, cut) == [0, 0, 0, 0]
    one = cut.clone()
    one[0, 2:6] = 2  # chunks 1 and 2, of ranks 1 and 2
    # Keys of rank 1 go to rank 2 forward and again backward; their gradients come back.
    assert ranks.run(run_counted, one) == [0, 2, 1, 0]
    whole_sequence = torch.zeros_like(cut)
    assert ranks.run(run_counted, whole_sequence) == [9, 9, 9, 9]


def test_a_document_goes_on_where_chunks_of_a_rank_do_not_touch():
    """Rank 0 of two holds positions 0, 1 and 6, 7: one document over all is one triangle."""
    mine = Split(2, 0, 8).take(torch.zeros(1, 8, dtype=torch.int64))
    assert triangle_bounds(mine).rows.tolist() == [0, 4]


def test_a_length_that_does_not_share_out_is_refused():
    with pytest.raises(ValueError, match=r"seq_len must be a multiple of 2 \* ranks = 4, got 6"):
        Split(2, 0, 6)


def test_pack_undoes_order():
    split = Split(3, 1, 12)
    sequence = torch.arange(24).view(2, 12)
    parts = split.pack(sequence)
    for rank, part in enumerate(parts):
        assert torch.equal(part, Split(3, rank, 12).take(sequence))
    assert torch.equal(split.order(torch.cat(list(parts), 1)), sequence)
