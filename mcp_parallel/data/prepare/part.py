"""The tokens of one piece: made in a process of its own, kept with a record of where they are from.

Started again after a crash, a run takes over each part whose source, tokenizer and bytes are still
the same.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mcp_parallel.data.prepare.index import digest, replace_file
from mcp_parallel.data.prepare.pieces import Piece, Text, texts_of
from mcp_parallel.data.prepare.recipe import Recipe
from mcp_parallel.data.prepare.sources import Shard, SourceError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Given to the tokenizer at a time: enough to keep its loop in Rust, few enough to hold.
_BATCH_TEXTS, _BATCH_CHARACTERS = 256, 1 << 20
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Task(NamedTuple):
    """A piece to tokenise."""

    shard: Shard
    piece: Piece
    stem: Path
    """The part is ``STEM.bin``, its record ``STEM.json``."""


@dataclass(frozen=True)
class Made:
    """A part."""

    tokens: int
    documents: int
    checksum: str
    """SHA-256 of its bytes."""
    bad: str | None = None
    """Why the shard is broken; then there are no bytes."""


def worker(recipe: Recipe, counters: Any, parent: int) -> None:
    """Get a process of a pool ready: it ends with its parent, and tokenises on one thread."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before it could be told so
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is the parent's
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _OF_WORKER[:] = [Maker(recipe, counters)]


_OF_WORKER: list[Maker] = []


def make_in_worker(task: Task) -> Made:
    """``Maker.make``, where ``worker`` has run."""
    return _OF_WORKER[0].make(task)


class Maker:
    """Makes parts by one recipe.

    Args:
        recipe: how text becomes tokens.
        counters: bytes and tokens so far, an array of shared memory that all makers add to.
    """

    def __init__(self, recipe: Recipe, counters: Any) -> None:
        self._recipe, self._counters = recipe, counters
        self._tokenizer = _plain(recipe.tokenizer)

    def make(self, task: Task) -> Made:
        """Tokenise one piece to ``STEM.bin``, and leave the record that says so.

        A broken source makes a part that says why, so that whether this is an error can be decided
        for the shard as a whole.
        """
        path = task.stem.with_suffix(".bin")
        try:
            with path.open("wb") as out:
                tokens, documents = self._write(task, out.write)
                out.flush()
                os.fsync(out.fileno())
        except SourceError as error:
            path.unlink()
            made = Made(0, 0, "", str(error))
        else:
            made = Made(tokens, documents, digest_of(path))
        record = {**_origin(task, self._recipe), **asdict(made)}
        replace_file(task.stem.with_suffix(".json"), json.dumps(record).encode())
        return made

    def _write(self, task: Task, write: Callable[[bytes], Any]) -> tuple[int, int]:
        """Write the tokens of a piece; returns how many, and of how many documents."""
        recipe, tokens, documents = self._recipe, 0, 0
        end = np.array([recipe.separator], dtype=recipe.dtype).tobytes()
        told = 0
        texts = texts_of(task.shard, task.piece, recipe.field, recipe.cut)
        for batch, share in _batches(texts, task.piece.size):
            before = tokens
            encodings = self._tokenizer.encode_batch([t.text for t in batch], False)
            for text, encoding in zip(batch, encodings, strict=True):
                ids = np.array(encoding.ids, dtype=np.int64).astype(recipe.dtype)
                write(ids.tobytes() + (end if text.is_end else b""))
                tokens += len(ids) + text.is_end
                documents += text.is_end
            self._count(share - told, tokens - before)
            told = share
        self._count(task.piece.size - told, 0)
        return tokens, documents

    def _count(self, num_bytes: int, tokens: int) -> None:
        with self._counters.get_lock():
            self._counters[0] += num_bytes
            self._counters[1] += tokens


def _plain(text: str) -> Tokenizer:
    """All of a document and nothing but it.

    A file may carry settings for batches of a model, and a text that spells the separator must not
    end there.
    """
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(text)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer


def _batches(texts: Iterator[Text], size: int) -> Iterator[tuple[list[Text], int]]:
    """Texts to tokenise together, and about how many of ``size`` bytes are then read."""
    batch: list[Text] = []
    characters = total = 0
    for text in texts:
        batch.append(text)
        characters += len(text.text)
        if len(batch) == _BATCH_TEXTS or characters >= _BATCH_CHARACTERS:
            total += characters
            yield batch, min(total, size)
            batch, characters = [], 0
    if batch:
        yield batch, min(total + characters, size)


def digest_of(path: Path) -> str:
    """SHA-256 of a file. Cost: reads it once."""
    return digest(path.read_bytes())


def _origin(task: Task, recipe: Recipe) -> dict[str, Any]:
    """What a part was made from."""
    return {"shard": list(task.shard), "piece": list(task.piece), "recipe": recipe.digest}


def kept(task: Task, recipe: Recipe) -> Made | None:
    """The part of an earlier run, where it is whole and still what this run would make."""
    try:
        record = json.loads(task.stem.with_suffix(".json").read_bytes())
        made = Made(*(record.pop(key) for key in ("tokens", "documents", "checksum", "bad")))
        if record != _origin(task, recipe) or made.bad is not None:
            return None  # what was broken may have been mended
        return made if made.checksum == digest_of(task.stem.with_suffix(".bin")) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # an earlier run did not get this far
