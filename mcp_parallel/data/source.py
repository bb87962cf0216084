"""What a run trains on, opened once, and the rows of its batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from numpy.typing import NDArray

from mcp_parallel.config import Config
from mcp_parallel.data.batch import BatchSource
from mcp_parallel.data.corpus import Corpus, open_corpus
from mcp_parallel.data.images import Images, ImageSource, open_digits

Data = Corpus | Images
"""What ``open_data`` gives."""


class Source(Protocol):
    """Any rows of any step, from (data, data seed, step) alone: see ``BatchSource``."""

    def batch(self, step: int, rows: range) -> tuple[NDArray[Any], NDArray[Any]]:
        """``(inputs [N, ...], targets [N, ...])``; targets are int64, -100 where there is none."""
        ...


def open_data(config: Config) -> Data:
    """The data that ``config`` names.

    Call it before the ranks are forked: they then share its pages.

    Raises:
        ValueError: it is not there, or broken.
        OSError: a file cannot be read.
    """
    return open_digits() if config.model.family == "vit" else open_corpus(config.data, config.model)


def source_of(data: Data, config: Config) -> Source:
    """The batches of a run over ``data``."""
    if isinstance(data, Images):
        patch_size = config.model.patch_size
        assert patch_size is not None
        return ImageSource(data, config.data.seed, patch_size, config.train.global_batch_size)
    return BatchSource(
        data,
        config.data.seed,
        config.model.seq_len,
        config.train.global_batch_size,
        config.data.document_separator,
    )


def validation_batches(
    source: Source, config: Config, rows: range
) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
    """The rows of each batch of the data's validation part; nothing where it has none.

    Every batch is as large as a training batch; the last one is filled up with samples whose target
    is -100.
    """
    if isinstance(source, ImageSource):
        for index in range(source.num_validation_batches):
            yield source.validation_batch(index, rows)


def documents_of(source: Source, config: Config, step: int, rows: range) -> NDArray[Any] | None:
    """Where each position's document begins, ``[N, S]`` int64; None without document masking."""
    if not config.data.document_masking:
        return None
    assert isinstance(source, BatchSource), "checked: only tokens have documents"
    return source.documents(step, rows)
