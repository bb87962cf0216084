"""The end of a corpus kept out of training, cut where a document begins."""

from __future__ import annotations

import bisect

import numpy as np

from mcp_parallel.data.corpus import Corpus

# Tokens looked at at a time for the next separator.
_WINDOW = 1 << 16


def split(corpus: Corpus, share: float, separator: int | None) -> tuple[Corpus, Corpus]:
    """``(training part, held-out part)``.

    The held-out documents are those that begin in the last ``share`` of the tokens. Where none
    does, as in one long text, the text itself is cut.

    Args:
        corpus: all of it.
        share: above 0 and at most 0.5.
        separator: token that ends documents, or None: files are documents then.

    Raises:
        ValueError: one part would not hold two tokens.

    Cost: reads on from the cut to the end of the document there.
    """
    total = len(corpus.tokens)
    cut = _next_document(corpus, total - round(share * total), separator)
    if cut < 2 or total - cut < 2:
        raise ValueError(
            f"data: data.validation_share must leave two tokens on both sides, got {share:g} of "
            f"{total} tokens of {corpus.names[0]!a}; use 0, or data.validation_path"
        )
    return corpus.part(0, cut), corpus.part(cut, total)


def _next_document(corpus: Corpus, target: int, separator: int | None) -> int:
    """Where the first document at or after ``target`` begins; ``target`` where none does."""
    total = len(corpus.tokens)
    file = bisect.bisect_left(corpus.starts, target)
    found = corpus.starts[file] if file < len(corpus.starts) else total
    if separator is not None:
        found = min(found, _after_separator(corpus, target, found, separator))
    return found if found <= total - 2 else target


def _after_separator(corpus: Corpus, target: int, stop: int, separator: int) -> int:
    # The token before ``target`` may end a document as well.
    for start in range(max(0, target - 1), stop, _WINDOW):
        window = np.asarray(corpus.tokens[start : min(start + _WINDOW, stop)])
        places = np.nonzero(window == separator)[0]
        if places.size:
            return start + int(places[0]) + 1
    return stop
