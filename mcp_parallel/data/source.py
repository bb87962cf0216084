"""What a run trains on, opened once, and the rows of its batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

from numpy.typing import NDArray

from mcp_parallel.config import Config
from mcp_parallel.data.batch import BatchSource
from mcp_parallel.data.corpus import Corpus
from mcp_parallel.data.images import Images, ImageSource, open_digits
from mcp_parallel.data.texts import Texts, open_texts

Data = Corpus | Texts | Images
"""What ``open_data`` gives; a corpus is text of a single source, all of it to train on."""


class ValidationBatch(NamedTuple):
    """Rows that are measured and not trained on."""

    inputs: NDArray[Any]
    targets: NDArray[Any]
    """int64, -100 where there is none."""
    documents: NDArray[Any] | None
    """Where each position's document begins, ``[N, S]`` int64; None without document masking."""


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
    if config.model.family == "vit":
        return open_digits()
    texts = open_texts(config)
    is_plain = len(texts.corpora) == 1 and not texts.held_out
    return texts.corpora[0] if is_plain else texts


def source_of(data: Data, config: Config) -> Source:
    """The batches of a run over ``data``."""
    if isinstance(data, Images):
        patch_size = config.model.patch_size
        assert patch_size is not None
        return ImageSource(data, config.data.seed, patch_size, config.train.global_batch_size)
    return (Texts((data,)) if isinstance(data, Corpus) else data).source(config)


def num_validation_batches(source: Source, config: Config) -> int:
    """Batches of the data's validation part; 0 where it has none.

    Every batch is as large as a training batch; the last one is filled up with samples whose target
    is -100. Of text there are at most ``monitor.validate_batches``.
    """
    if isinstance(source, ImageSource):
        return source.num_validation_batches
    if isinstance(source, BatchSource):
        num_batches = -(-source.num_held_out // config.train.global_batch_size)
        return min(num_batches, config.monitor.validate_batches)
    return 0


def validation_batch(source: Source, config: Config, index: int, rows: range) -> ValidationBatch:
    """Rows of a batch of the validation part.

    Raises:
        TokenFileError: bytes are not what was written.
        StorageError: a URL cannot be reached any more.
    """
    if isinstance(source, ImageSource):
        return ValidationBatch(*source.validation_batch(index, rows), None)
    assert isinstance(source, BatchSource)
    inputs, targets, documents = source.held_out(index, rows)
    return ValidationBatch(inputs, targets, documents if config.data.document_masking else None)


def validation_batches(source: Source, config: Config, rows: range) -> Iterator[ValidationBatch]:
    """The rows of each batch of the data's validation part; nothing where it has none."""
    for index in range(num_validation_batches(source, config)):
        yield validation_batch(source, config, index, rows)


def documents_of(source: Source, config: Config, step: int, rows: range) -> NDArray[Any] | None:
    """Where each position's document begins, ``[N, S]`` int64; None without document masking."""
    if not config.data.document_masking:
        return None
    assert isinstance(source, BatchSource), "checked: only tokens have documents"
    return source.documents(step, rows)
