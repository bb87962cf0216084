"""Rules of sequences that several ranks share, and of documents in them. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from mcp_parallel.config import Config
from mcp_parallel.data import files
from mcp_parallel.data.sources import named_sources
from mcp_parallel.errors import shown
from mcp_parallel.rules.data import has_index
from mcp_parallel.rules.problem import Problem, divisors, nearest, nearest_multiples, ways
from mcp_parallel.rules.values import BOUNDS


def context_problems(config: Config) -> Iterator[Problem]:
    """Sequences that cp ranks cannot share: each holds two chunks, an early one and a late one."""
    seq_len, cp = config.model.seq_len, config.parallel.cp
    if cp == 1 or seq_len % (2 * cp) == 0:
        return
    legal = {1, *(degree for degree in divisors(seq_len) if seq_len % (2 * degree) == 0)}
    degrees = ways("parallel.cp", nearest(legal, cp), 3)
    lengths = ways(
        "model.seq_len",
        nearest_multiples(2 * cp, seq_len, 1, int(BOUNDS["model.seq_len"].high)),
        2,
    )
    yield Problem(
        "seq_len over cp",
        "model.seq_len",
        f"be a multiple of 2 * cp = {2 * cp}",
        str(seq_len),
        # The number of an image's patches follows from its size.
        degrees if config.model.family == "vit" else lengths + degrees[:1],
    )


def document_problems(config: Config) -> Iterator[Problem]:
    """Documents whose ends are unknown, or a separator that is no token or goes unread."""
    data, vocab_size = config.data, config.model.vocab_size
    separator = data.document_separator
    off = {"data.document_masking": False}
    if separator is not None and not data.document_masking:
        yield Problem(
            "document_separator unread",
            "data.document_separator",
            "be null without document_masking",
            shown(separator),
            ({"data.document_separator": None}, {"data.document_masking": True}),
        )
    if separator is not None and separator >= vocab_size:
        yield Problem(
            "document_separator over vocabulary",
            "data.document_separator",
            f"be below vocab_size = {vocab_size}",
            shown(separator),
            ({"data.document_separator": None}, {"model.vocab_size": separator + 1}),
        )
    unknown = [
        source.path
        for source in named_sources(data)
        if source.path is not None
        and files.kind_of(source.path) == "tokens"
        and not has_index(source.path)
    ]
    if data.document_masking and separator is None and unknown:
        yield Problem(
            "documents of tokens",
            "data.document_separator",
            f"be the token that ends a document where {shown(unknown[0])} has no index.json",
            "null",
            ({"data.document_separator": vocab_size - 1}, off),
        )
