"""A corpus: one flat array of tokens, cut into samples of seq_len tokens and their targets."""

from __future__ import annotations

import bisect
import itertools
import platform
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcp_parallel.config import DataConfig, ModelConfig
from mcp_parallel.data import cache, files, storage
from mcp_parallel.data.prepare.index import Index
from mcp_parallel.data.token_file import TokenBlocks, TokenFileError, open_blocks

IGNORED_TARGET = -100
"""What cross entropy skips; marks the padding of a last, short sample."""
_PADDING = 0


@dataclass(frozen=True, slots=True)
class Corpus:
    """Tokens and where they came from.

    Sample i holds tokens ``[i * seq_len, i * seq_len + seq_len]``: neighbours share one token, so
    every token but the first is a target once. The last sample may be short and is padded.
    """

    tokens: NDArray[Any] | TokenBlocks
    """``[N]`` uint8, uint16 or uint32, read-only."""
    vocab_size: int
    """Tokens must be below it."""
    names: tuple[str, ...] = ("tokens",)
    """The files, in order."""
    starts: tuple[int, ...] = (0,)
    """Index of each file's first token."""
    separator: int | None = None
    """The token that ends documents, where the data says so itself."""
    tokenizer: str = ""
    """What made the tokens (see ``Index.tokenizer``); empty where that is not known."""

    def part(self, start: int, stop: int) -> Corpus:
        """Tokens ``[start, stop)`` as a corpus of their own, nothing copied."""
        tokens = self.tokens
        first = bisect.bisect_right(self.starts, start) - 1
        last = bisect.bisect_left(self.starts, stop)
        return replace(
            self,
            tokens=tokens.part(start, stop)
            if isinstance(tokens, TokenBlocks)
            else tokens[start:stop],
            names=self.names[first:last],
            starts=tuple(max(0, at - start) for at in self.starts[first:last]),
        )

    def num_samples(self, seq_len: int) -> int:
        """Samples of at most ``seq_len`` targets each; 0 when there are not two tokens."""
        return -(-max(0, len(self.tokens) - 1) // seq_len)

    def sample(self, index: int, seq_len: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Sample ``index`` as ``(inputs [S], targets [S])``, int64; targets are -100 in padding.

        Raises:
            ValueError: no such sample.
            TokenFileError: a token out of the vocabulary, or bytes that are not what was written.
        """
        inputs, targets = self.samples(np.array([index]), seq_len)
        return inputs[0], targets[0]

    def samples(
        self, indices: NDArray[np.int64], seq_len: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Samples as ``(inputs [N, S], targets [N, S])``, int64.

        Raises:
            ValueError: no such sample.
            TokenFileError: a token out of the vocabulary, or bytes that are not what was written.

        Cost: copies N * (S + 1) tokens.
        """
        count = self.num_samples(seq_len)
        if indices.size and not (int(indices.min()) >= 0 and int(indices.max()) < count):
            raise ValueError(
                f"Corpus.samples: indices must be in [0, {count}), got {int(indices.min())} to "
                f"{int(indices.max())}; take them from sample_indices"
            )
        inputs = np.empty((indices.size, seq_len), dtype=np.int64)
        targets = np.empty_like(inputs)
        for row, index in enumerate(indices.tolist()):
            start = index * seq_len
            window = self.tokens[start : start + seq_len + 1]
            length = len(window) - 1
            inputs[row, :length], targets[row, :length] = window[:-1], window[1:]
            inputs[row, length:], targets[row, length:] = _PADDING, IGNORED_TARGET
            if int(window.max()) >= self.vocab_size:
                raise TokenFileError(self._out_of_vocabulary(start, window))
        return inputs, targets

    def documents(
        self, indices: NDArray[np.int64], seq_len: int, separator: int | None = None
    ) -> NDArray[np.int64]:
        """Where the document of each position of samples begins, ``[N, S]`` int64.

        A document is a file, cut after every ``separator``, which belongs to what it ends. One that
        began before the sample begins at its position 0; padding belongs to the last.

        Args:
            indices: of samples, as ``samples`` takes them.
            seq_len: positions of a sample.
            separator: a token, or None.

        Cost: as ``samples``.
        """
        begins = np.zeros((indices.size, seq_len), dtype=np.int64)
        for row, index in enumerate(indices.tolist()):
            start = index * seq_len
            first = bisect.bisect_right(self.starts, start)
            last = bisect.bisect_left(self.starts, start + seq_len)
            places = np.array(self.starts[first:last], dtype=np.int64) - start
            if separator is not None:
                window = np.asarray(self.tokens[start : start + seq_len - 1])
                places = np.concatenate([places, np.nonzero(window == separator)[0] + 1])
            begins[row, places] = places
        return np.maximum.accumulate(begins, axis=1)

    def _out_of_vocabulary(self, start: int, window: NDArray[Any]) -> str:
        position = start + int(np.argmax(window >= self.vocab_size))
        piece = bisect.bisect_right(self.starts, position) - 1
        return (
            f"data: tokens must be below vocab_size = {self.vocab_size}, got "
            f"{int(self.tokens[position])} at token {position - self.starts[piece]} of "
            f"{self.names[piece]!a}; use model.vocab_size above the largest token"
        )


def open_corpus(data: DataConfig, model: ModelConfig) -> Corpus:
    """The tokens that ``data.path`` names: see ``open_source``."""
    return open_source(data, model, "data.path", data.path)


def open_source(data: DataConfig, model: ModelConfig, key: str, path: str | None) -> Corpus:
    """The tokens at ``path``.

    None is the Python standard library's own source, the same on every machine with the same
    Python. A folder is its text files in the order of their names, a text file is its bytes as they
    stand, and a ``.bin`` file is flat little-endian tokens: of the width that its index says, or
    uint16, uint32 when ``vocab_size > 65536``.

    Call it before the ranks are forked: they then share the mapped pages. A folder (and the
    standard library) is joined into one file in the user's cache, see ``data.cache``; a token file
    behind a URL has a copy there that fills as it is read, see ``data.token_file``.

    Args:
        data: how token files are checked.
        model: its vocabulary.
        key: where the path stands, for messages.
        path: of a file or a folder, or a URL of a token file.

    Raises:
        ValueError: nothing there, fewer than two tokens, a token file that is not what was
            written, of another vocabulary, or behind a URL that cannot be reached.
        OSError: a file cannot be read.
    """
    if path is None:
        version = f"stdlib-{platform.python_implementation().lower()}-{platform.python_version()}"
        return _joined(version, list(files.stdlib_files()), model, "the standard library")
    kind = files.kind_of(path)
    if kind == "folder":
        found = list(files.text_files(storage.local_path(path)))
        return _joined("folder", found, model, ascii(path))
    if kind not in ("file", "tokens", "url") or not path:
        raise ValueError(
            f"data: {key} must name a file or folder that exists, got {path!a}; "
            "use data.path = null for the default"
        )
    if kind != "file" and (opened := open_blocks(path, data.verify)) is not None:
        tokens, index = opened
        _refuse_other_vocabulary(path, index, model)
        return Corpus(tokens, model.vocab_size, (path,), (0,), index.separator, index.tokenizer)
    width = files.token_width(model.vocab_size) if kind == "tokens" else 1
    location = storage.local_path(path)
    size = location.stat().st_size
    if size % width or size < 2 * width:
        raise ValueError(
            f"data: {path!a} must hold two or more whole tokens of {width} bytes, got "
            f"{size} bytes; write it again or use data.path = null for the default"
        )
    tokens = np.memmap(location, dtype=np.dtype(f"<u{width}"), mode="r")
    return Corpus(tokens, model.vocab_size, (path,), (0,))


def _refuse_other_vocabulary(path: str, index: Index, model: ModelConfig) -> None:
    if index.vocab_size > model.vocab_size:
        raise TokenFileError(
            f"data: {path!a} must hold tokens below model.vocab_size = {model.vocab_size}, got a "
            f"vocabulary of {index.vocab_size}; use model.vocab_size = {index.vocab_size}"
        )


def _joined(name: str, found: Sequence[files.TextFile], model: ModelConfig, source: str) -> Corpus:
    if sum(file.size for file in found) < 2:
        raise ValueError(
            f"data: {source} must hold two or more tokens of text, got {len(found)} files without; "
            "give another data.path"
        )
    tokens = cache.joined_bytes(name, found)
    lengths = (file.size + len(cache.SEPARATOR) for file in found)
    starts = tuple(itertools.accumulate(lengths, initial=0))[:-1]
    return Corpus(tokens, model.vocab_size, tuple(file.name for file in found), starts)
