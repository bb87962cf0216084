"""The rows of a step's global batch that a rank asks for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mcp_parallel.data.blend import Blend, source_seed
from mcp_parallel.data.corpus import IGNORED_TARGET, Corpus
from mcp_parallel.data.order import sample_indices

# The order in which held-out samples are measured, so that a limit takes some of every source; part
# of what a validation loss means, hence no setting.
_HELD_OUT_SEED = 0
# Positions that are ordered at once: numpy takes as long for a few as for thousands.
_ORDERED = 4096

_Ordered = tuple[tuple[int, range], NDArray[np.int64], NDArray[np.int64]]


class BatchSource:
    """Any rows of any step, from (corpora, shares, data seed, step) alone.

    Nothing that matters is remembered between calls and no rank is mentioned: a layout only decides
    which rows a rank asks for, and a run resumes from its step number.

    Args:
        corpus: what to train on; several make a mixture.
        data_seed: of the order.
        seq_len: tokens of a sample.
        global_batch_size: samples of a step.
        document_separator: token that ends documents; None takes what each corpus says.
        units: share of each corpus, in any unit; equal ones where it is not given.
        held_out: text that is measured and not trained on.
    """

    def __init__(
        self,
        corpus: Corpus | Sequence[Corpus],
        data_seed: int,
        seq_len: int,
        global_batch_size: int,
        document_separator: int | None = None,
        *,
        units: Sequence[int] | None = None,
        held_out: Sequence[Corpus] = (),
    ) -> None:
        self._corpora = (corpus,) if isinstance(corpus, Corpus) else tuple(corpus)
        self._seeds = [source_seed(data_seed, number) for number in range(len(self._corpora))]
        self._blend = Blend(units or [1] * len(self._corpora), data_seed)
        self._held_out = tuple(held_out)
        self._seq_len = seq_len
        self._global_batch_size = global_batch_size
        self._document_separator = document_separator
        self._counts = [corpus.num_samples(seq_len) for corpus in self._corpora]
        held_out_counts = [corpus.num_samples(seq_len) for corpus in self._held_out]
        self._ordered: _Ordered | None = None
        self._held_out_ends = np.cumsum(np.array(held_out_counts, dtype=np.int64))

    @property
    def num_samples(self) -> int:
        """Samples of all corpora; of a single one they make an epoch."""
        return sum(self._counts)

    @property
    def num_held_out(self) -> int:
        """Samples that are measured and not trained on."""
        return int(self._held_out_ends[-1]) if self._held_out else 0

    def batch(self, step: int, rows: range) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Rows of the global batch of a step.

        Args:
            step: optimizer steps before this one.
            rows: positions in the global batch, within ``[0, global_batch_size)``.

        Returns:
            ``(inputs [N, S], targets [N, S])``, int64; targets are -100 in padding.

        Raises:
            ValueError: rows or step out of range.
            TokenFileError: a token out of the vocabulary, with its file and position, or a block
                of a token file that is not what was written.
            StorageError: a token file's URL cannot be reached any more.
        """
        return self._samples(self._corpora, *self._at(step, rows))

    def documents(self, step: int, rows: range) -> NDArray[np.int64]:
        """Where the document of each position of ``batch``'s rows begins: see ``Corpus.documents``.

        Args:
            step: as there.
            rows: as there.

        Raises:
            ValueError: as there.
        """
        return self._documents(self._corpora, *self._at(step, rows))

    def held_out(
        self, index: int, rows: range
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Rows of a batch of the held-out samples, as large as one of training.

        Returns:
            ``(inputs, targets, documents)``, each ``[N, S]`` int64; past the last sample targets
            are -100.

        Raises:
            TokenFileError: as there.
            StorageError: as there.
        """
        count = self.num_held_out
        at = np.arange(rows.start, rows.stop, rows.step) + index * self._global_batch_size
        is_past = at >= count
        chosen = sample_indices(_HELD_OUT_SEED, np.where(is_past, 0, at), count)
        source = np.searchsorted(self._held_out_ends, chosen, side="right")
        ends = np.concatenate([[0], self._held_out_ends])
        places = source, chosen - ends[source]
        inputs, targets = self._samples(self._held_out, *places)
        targets[is_past] = IGNORED_TARGET
        return inputs, targets, self._documents(self._held_out, *places)

    def _at(self, step: int, rows: range) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(corpus, sample in it) of these rows of the step's global batch."""
        size = self._global_batch_size
        if step < 0 or (rows and not (min(rows) >= 0 and max(rows) < size)):
            raise ValueError(
                f"BatchSource.batch: rows must be in [0, {size}) of a step >= 0, got {rows} of "
                f"step {step}; split range({size}) over the ranks"
            )
        if not rows:
            return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
        steps = max(1, _ORDERED // len(rows))
        key = (step // steps, rows)
        # One assignment, so that a thread that makes batches ahead can't see half of it.
        ordered = self._ordered
        if ordered is None or ordered[0] != key:
            first = np.arange(steps, dtype=np.int64) + step // steps * steps
            positions = first[:, None] * size + np.array(rows, dtype=np.int64)
            self._ordered = ordered = (key, *self._in_order(positions))
        return ordered[1][step % steps], ordered[2][step % steps]

    def _in_order(
        self, positions: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(corpus, sample in it) of positions of the run, of any shape."""
        source, number = self._blend.at(positions)
        indices = np.empty_like(number)
        for one in np.unique(source):
            mine = source == one
            indices[mine] = sample_indices(self._seeds[one], number[mine], self._counts[one])
        return source, indices

    def _samples(
        self, corpora: Sequence[Corpus], source: NDArray[np.int64], indices: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Inputs and targets of samples of several corpora, in their order."""
        if len(corpora) == 1:
            return corpora[0].samples(indices, self._seq_len)
        inputs = np.empty((len(indices), self._seq_len), dtype=np.int64)
        targets = np.empty_like(inputs)
        for one in np.unique(source):
            mine = source == one
            inputs[mine], targets[mine] = corpora[one].samples(indices[mine], self._seq_len)
        return inputs, targets

    def _documents(
        self, corpora: Sequence[Corpus], source: NDArray[np.int64], indices: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """``Corpus.documents`` of samples of several corpora, in their order."""
        begins = np.empty((len(indices), self._seq_len), dtype=np.int64)
        for one in np.unique(source):
            mine, corpus = source == one, corpora[one]
            separator = self._document_separator
            separator = corpus.separator if separator is None else separator
            begins[mine] = corpus.documents(indices[mine], self._seq_len, separator)
        return begins
