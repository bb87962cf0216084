"""Helpers of the tests of ``mcp-parallel data``."""

from __future__ import annotations

import numpy as np
import pytest

from mcp_parallel.cli.main import main
from mcp_parallel.data.prepare.index import verify
from mcp_parallel.data.prepare.pieces import pieces_of, texts_of
from mcp_parallel.data.prepare.sources import Shard
from mcp_parallel.data.storage import stamp_of

tokenizers = pytest.importorskip("tokenizers")


def prepare(source, out, *more, jobs=1):
    vocab = () if "--tokenizer" in more else ("--train-vocab", "300")
    return main(["data", str(source), "--out", str(out), "--jobs", str(jobs), *vocab, *more])


def texts_in(out):
    """The token file read back, document by document."""
    found = verify(out)
    tokens = np.fromfile(out / "tokens.bin", dtype=f"<u{found.width}").tolist()
    tokenizer = tokenizers.Tokenizer.from_file(str(out / "tokenizer.json"))
    texts, start = [], 0
    for position, token in enumerate(tokens):
        if token == found.separator:
            texts.append(tokenizer.decode(tokens[start:position], skip_special_tokens=False))
            start = position + 1
    assert start == len(tokens) == found.tokens
    return texts


def shard_of(path):
    return Shard(path.name, str(path), path.stat().st_size, stamp_of(str(path)))


def segments(path, cut, field="text"):
    shard = shard_of(path)
    return [list(texts_of(shard, piece, field, cut)) for piece in pieces_of(shard, cut)]
