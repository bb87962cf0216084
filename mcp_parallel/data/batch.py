"""The rows of a step's global batch that a rank asks for."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mcp_parallel.data.corpus import Corpus
from mcp_parallel.data.order import sample_indices


class BatchSource:
    """Any rows of any step, from (corpus, data seed, step) alone.

    Nothing is remembered between calls and no rank is mentioned: a layout only decides which rows a
    rank asks for, and a run resumes from its step number.
    """

    def __init__(
        self,
        corpus: Corpus,
        data_seed: int,
        seq_len: int,
        global_batch_size: int,
        document_separator: int | None = None,
    ) -> None:
        self._corpus = corpus
        self._data_seed = data_seed
        self._seq_len = seq_len
        self._global_batch_size = global_batch_size
        self._document_separator = document_separator
        self._num_samples = corpus.num_samples(seq_len)

    @property
    def num_samples(self) -> int:
        """Samples of an epoch."""
        return self._num_samples

    def batch(self, step: int, rows: range) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Rows of the global batch of a step.

        Args:
            step: optimizer steps before this one.
            rows: positions in the global batch, within ``[0, global_batch_size)``.

        Returns:
            ``(inputs [N, S], targets [N, S])``, int64; targets are -100 in padding.

        Raises:
            ValueError: rows or step out of range, or a token out of the vocabulary, with its file
                and position.
        """
        return self._corpus.samples(self._indices(step, rows), self._seq_len)

    def documents(self, step: int, rows: range) -> NDArray[np.int64]:
        """Where the document of each position of ``batch``'s rows begins: see ``Corpus.documents``.

        Args:
            step: as there.
            rows: as there.

        Raises:
            ValueError: as there.
        """
        indices = self._indices(step, rows)
        return self._corpus.documents(indices, self._seq_len, self._document_separator)

    def _indices(self, step: int, rows: range) -> NDArray[np.int64]:
        """The samples that are these rows of the step's global batch."""
        size = self._global_batch_size
        if step < 0 or (rows and not (min(rows) >= 0 and max(rows) < size)):
            raise ValueError(
                f"BatchSource.batch: rows must be in [0, {size}) of a step >= 0, got {rows} of "
                f"step {step}; split range({size}) over the ranks"
            )
        positions = np.arange(rows.start, rows.stop, rows.step, dtype=np.int64) + step * size
        return sample_indices(self._data_seed, positions, self._num_samples)
