"""How text becomes tokens: a tokenizer, trained or loaded, and everything else that decides it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mcp_parallel.data import storage
from mcp_parallel.data.files import token_width
from mcp_parallel.data.prepare.index import TOKENIZER_FILE, replace_file
from mcp_parallel.data.prepare.pieces import DEFAULT_CUT, Cut, pieces_of, texts_of
from mcp_parallel.data.prepare.sources import Shard, SourceError
from mcp_parallel.errors import shown

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SEPARATOR = "<|endoftext|>"
REQUEST_FILE = "request.json"
# A vocabulary hardly changes with more text, and pairs are counted in memory.
_TRAINED_BYTES = 512 << 20


@dataclass(frozen=True)
class Recipe:
    """How text becomes tokens; the same for every piece."""

    tokenizer: str
    """The tokenizer's JSON."""
    field: str
    """Key or column of the text in JSONL and Parquet."""
    separator: int
    vocab_size: int
    cut: Cut = DEFAULT_CUT

    @property
    def digest(self) -> str:
        """Changes when a token could."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()

    @property
    def tokenizer_digest(self) -> str:
        """Equal where tokens mean the same."""
        return hashlib.sha256(self.tokenizer.encode()).hexdigest()

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of a token in a file."""
        return np.dtype(f"<u{token_width(self.vocab_size)}")


def train_tokenizer(
    shards: Sequence[Shard], field: str, vocab_size: int, *, skip_bad: bool = False
) -> Tokenizer:
    """A byte-level BPE tokenizer of the documents; every text has tokens, whatever its bytes.

    Args:
        shards: sources; of more than 512 MiB every n-th piece is taken.
        field: key or column of the text.
        vocab_size: tokens, the separator among them.
        skip_bad: take of a broken shard what comes before the break.

    Raises:
        SourceError: a shard is broken.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[SEPARATOR],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(shards, field, skip_bad), trainer)
    return tokenizer


def _texts(shards: Sequence[Shard], field: str, skip_bad: bool) -> Iterator[str]:
    stride = max(1, -(-sum(shard.size for shard in shards) // _TRAINED_BYTES))
    number = count()
    for shard in shards:
        with suppress(SourceError) if skip_bad else nullcontext():
            for piece in pieces_of(shard, DEFAULT_CUT):
                if next(number) % stride == 0:
                    yield from (found.text for found in texts_of(shard, piece, field, DEFAULT_CUT))


def trained_tokenizer(
    shards: Sequence[Shard], folder: Path, field: str, vocab_size: int, *, skip_bad: bool = False
) -> Tokenizer:
    """``train_tokenizer``, or what a stopped run of the same request left in ``folder``."""
    request, kept = folder / REQUEST_FILE, folder / TOKENIZER_FILE
    asked = {"vocab": vocab_size, "field": field, "skip_bad": skip_bad, "shards": list(shards)}
    wanted = json.dumps(asked).encode()
    if request.is_file() and kept.is_file() and request.read_bytes() == wanted:
        return load_tokenizer(str(kept))
    tokenizer = train_tokenizer(shards, field, vocab_size, skip_bad=skip_bad)
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(kept, tokenizer.to_str().encode())
    replace_file(request, wanted)
    return tokenizer


def load_tokenizer(path: str) -> Tokenizer:
    """The tokenizer in a ``tokenizer.json``, a path or a URL.

    Raises:
        SourceError: there is none.
        StorageError: the URL cannot be reached.
    """
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_str(storage.content(path).decode("utf-8"))
    except storage.StorageError:
        raise
    except Exception as error:  # the package raises bare Exception for all that can go wrong
        raise SourceError(
            f"data: --tokenizer must be a tokenizer.json, got {path!a} "
            f"({shown(str(error))[1:-1]}); give one, or --train-vocab to make one"
        ) from None


def recipe_of(tokenizer: Tokenizer, field: str, separator: str) -> Recipe:
    """The recipe of a tokenizer.

    Raises:
        SourceError: ``separator`` is none of its tokens.
    """
    number = tokenizer.token_to_id(separator)
    if number is None:
        raise SourceError(
            f"data: --separator must be a token of the tokenizer, got {shown(separator)}; "
            "give the one that ends its documents"
        )
    return Recipe(tokenizer.to_str(), field, number, max(tokenizer.get_vocab().values()) + 1)
