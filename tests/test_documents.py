"""Document masking: where documents begin, attention within them, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from configs import assert_ways_out, config_of, names, problem_of
from test_context_attention import dense, make, random_documents

from mcp_parallel.check import check
from mcp_parallel.config import Config
from mcp_parallel.context.split import Split
from mcp_parallel.data.batch import BatchSource
from mcp_parallel.data.corpus import Corpus, open_corpus
from mcp_parallel.data.source import documents_of, source_of
from mcp_parallel.model.attend import WholeSequence
from mcp_parallel.model.family import whole_model
from mcp_parallel.model.rotary import rotate

SEPARATOR = 0


def naive_documents(tokens, starts, index, seq_len, separator):
    """Position by position: a document begins at a file's start and after every separator."""
    offset = index * seq_len
    begin, row = 0, []
    for position in range(seq_len):
        at = offset + position
        ended = separator is not None and 0 < at <= len(tokens) and tokens[at - 1] == separator
        begin = position if at in starts or (ended and position) else begin
        row.append(begin)
    return row


@pytest.mark.parametrize("separator", [None, SEPARATOR])
@pytest.mark.parametrize("seq_len", [1, 4, 7, 50, 101])
def test_begins_follow_files_and_separators(seq_len, separator):
    rng = np.random.default_rng(3)
    tokens = rng.integers(0, 6, 100).astype(np.uint8)
    starts = (0, 3, 4, 21, 28, 99)
    corpus = Corpus(tokens, 6, tuple("abcdef"), starts)
    indices = np.arange(corpus.num_samples(seq_len))
    got = corpus.documents(indices, seq_len, separator)
    assert got.dtype == np.int64
    wanted = [naive_documents(tokens, starts, i, seq_len, separator) for i in indices]
    assert got.tolist() == wanted


def test_a_separator_belongs_to_what_it_ends():
    corpus = Corpus(np.array([5, 0, 5, 5, 0, 5], dtype=np.uint8), 6)
    assert corpus.documents(np.array([0]), 5, SEPARATOR).tolist() == [[0, 0, 2, 2, 2]]


def test_a_batch_and_its_documents_are_of_the_same_samples():
    rng = np.random.default_rng(4)
    corpus = Corpus(rng.integers(0, 4, 1000).astype(np.uint8), 4)
    source = BatchSource(corpus, 7, 10, 6, SEPARATOR)
    for step in (0, 5, 40):
        inputs, _ = source.batch(step, range(2, 6))
        documents = source.documents(step, range(2, 6))
        for row, begins in zip(inputs, documents, strict=True):
            ends = np.nonzero(row[:-1] == SEPARATOR)[0] + 1
            assert sorted({0, *ends.tolist()}) == sorted(set(begins.tolist()))


def test_files_of_the_default_text_are_documents():
    config = config_of(data__document_masking=True)
    corpus = open_corpus(config.data, config.model)
    source = source_of(corpus, config)
    assert (documents_of(source, config, 0, range(16)) == 0).mean() > 0.5
    first = corpus.starts[1]
    seq_len = config.model.seq_len
    begins = corpus.documents(np.array([first // seq_len]), seq_len)[0]
    assert begins[first % seq_len] == first % seq_len
    assert documents_of(source, Config(), 0, range(16)) is None


@pytest.mark.parametrize("seed", range(6))
def test_attention_stays_within_documents(seed):
    sizes = (3, 41, 4, 2, 8)
    q, k, v, dout = make(*sizes)
    documents = random_documents(3, 41, seed)
    attend = WholeSequence()
    mine = [t.clone().requires_grad_() for t in (q, k, v)]
    out = attend(*mine, attend.plan(documents, q.device))
    out.backward(dout)
    for got, want in zip(
        [out.detach(), *(t.grad for t in mine)], dense(q, k, v, dout, documents), strict=True
    ):
        assert (got - want).abs().max() <= 2 * 41 * 2**-52 * 8


def test_a_document_is_trained_as_if_it_stood_alone():
    """Logits of a document do not depend on what precedes it, nor on where it begins."""
    config = config_of(model__seq_len=24).model
    torch.manual_seed(0)
    model = whole_model(config).double()
    with torch.no_grad():
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        tokens = torch.randint(256, (1, 24))
        documents = torch.tensor([[0] * 9 + [9] * 15])
        together = model(tokens, documents)
        alone = model(tokens[:, 9:])
        without = model(tokens)
    # Rotary angles of shifted positions are rounded anew: float64 of angles up to 24.
    torch.testing.assert_close(together[:, 9:], alone, rtol=0, atol=1e-12)
    torch.testing.assert_close(together[:, :9], without[:, :9], rtol=0, atol=1e-12)
    assert (together - without)[:, 9:].abs().max() > 1e-3


@pytest.mark.parametrize("size", [8, 64])  # both kinds of tables
@pytest.mark.parametrize("world", [2, 3])
def test_positions_follow_the_split(world, size):
    length = 2 * world * 5
    x = torch.randn(2, length, 3, size, dtype=torch.float64)
    whole, _ = rotate(x, x, 1e4)
    for rank in range(world):
        split = Split(world, rank, length)
        part = split.take(x)
        assert torch.equal(rotate(part, part, 1e4, split.starts)[0], split.take(whole))


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"data__document_separator": 10}, "document_separator unread"),
        (
            {"data__document_masking": True, "data__document_separator": 256},
            "document_separator over vocabulary",
        ),
        ({"parallel__cp": 3}, "seq_len over cp"),
        ({"parallel__cp": 4, "model__seq_len": 100}, "seq_len over cp"),
    ],
)
def test_refusals_name_a_way_out(changes, name):
    config = config_of(**changes)
    assert name in names(config)
    assert_ways_out(config)


def test_documents_of_a_token_file_need_a_separator(tmp_path):
    path = tmp_path / "tokens.bin"
    np.arange(256, dtype=np.uint16).tofile(path)
    config = config_of(data__path=str(path), data__document_masking=True)
    message = problem_of(lambda: check(config))
    assert "data.document_separator must be the token that ends a document" in message
    assert_ways_out(config)
    check(config_of(data__path=str(path), data__document_masking=True, data__document_separator=3))


def test_a_separator_is_a_token_number():
    message = problem_of(
        lambda: check(config_of(data__document_masking=True, data__document_separator=-1))
    )
    assert "data.document_separator must be at least 0" in message


def test_ranks_that_share_a_sequence_are_proposed_to_who_asked_for_them():
    """128 positions over 8 ranks with cp = 4 wished for: a legal layout with cp near it first."""
    config = config_of(parallel__cp=4, parallel__dp=1)
    message = problem_of(lambda: check(config, 8))
    assert "make dp * tp * pp * cp the number of ranks, 8" in message
    assert "parallel.cp = 4" in message
    assert "parallel.cp" not in problem_of(lambda: check(config_of(), 8))
