"""Source files to one token file: tokenised in parallel into parts, joined, indexed.

A part is kept with a record of what it was made from. Started again after a crash, a run takes over
each part whose source, tokenizer and bytes are still the same, and makes the others.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mcp_parallel.data.files import TextFile, token_width
from mcp_parallel.data.prepare.documents import SourceError, documents
from mcp_parallel.data.prepare.index import (
    TOKENS_FILE,
    Index,
    Part,
    checksums_of,
    replace_file,
)
from mcp_parallel.errors import shown

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SEPARATOR = "<|endoftext|>"
TOKENIZER_FILE, PARTS_FOLDER = "tokenizer.json", "parts"
# Documents given to the tokenizer at a time: enough to keep its loop in Rust, few enough to hold.
_BATCH = 256


@dataclass(frozen=True)
class Recipe:
    """How text becomes tokens; the same for every part."""

    tokenizer: str
    """The tokenizer's JSON."""
    field: str
    """Key of the text in JSONL."""
    separator: int
    vocab_size: int

    @property
    def digest(self) -> str:
        """Changes when a token could."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of a token in a file."""
        return np.dtype(f"<u{token_width(self.vocab_size)}")


def train_tokenizer(files: Sequence[TextFile], field: str, vocab_size: int) -> Tokenizer:
    """A byte-level BPE tokenizer of all documents; every text has tokens, whatever its bytes."""
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
    every = (text for file in files for text in documents(file, field))
    tokenizer.train_from_iterator(every, trainer)
    return tokenizer


def trained_tokenizer(
    files: Sequence[TextFile], folder: Path, field: str, vocab_size: int
) -> Tokenizer:
    """``train_tokenizer``, or what a stopped run of the same request left in ``folder``."""
    request, kept = folder / PARTS_FOLDER / "request.json", folder / TOKENIZER_FILE
    stamps = [[str(f.path), f.size, f.path.stat().st_mtime_ns] for f in files]
    wanted = json.dumps({"vocab": vocab_size, "field": field, "files": stamps}).encode()
    if request.is_file() and kept.is_file() and request.read_bytes() == wanted:
        return load_tokenizer(kept)
    tokenizer = train_tokenizer(files, field, vocab_size)
    request.parent.mkdir(parents=True, exist_ok=True)
    replace_file(kept, tokenizer.to_str().encode())
    replace_file(request, wanted)
    return tokenizer


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer in a ``tokenizer.json``.

    Raises:
        SourceError: there is none.
    """
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises bare Exception for all that can go wrong
        raise SourceError(
            f"data: --tokenizer must be a tokenizer.json, got {str(path)!a} ({error}); "
            "give one, or --train-vocab to make one"
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


def build(
    files: Sequence[TextFile],
    folder: Path,
    recipe: Recipe,
    jobs: int,
    progress: Callable[[int, int], None],
) -> Index:
    """Tokenise ``files`` into ``folder``.

    Args:
        files: sources, in the order in which their tokens are to stand.
        folder: gets ``tokens.bin``, its ``index.json`` and ``tokenizer.json``; holds ``parts`` on
            the way.
        recipe: how.
        jobs: processes; each takes a file at a time.
        progress: called with bytes done and tokens so far after each file.

    Raises:
        SourceError: a file is broken; parts of others stay for the next run.
    """
    parts = folder / PARTS_FOLDER
    parts.mkdir(parents=True, exist_ok=True)
    (folder / "index.json").unlink(missing_ok=True)
    replace_file(folder / TOKENIZER_FILE, recipe.tokenizer.encode())
    made: dict[int, Part] = {}
    done_bytes = 0
    for number, part in _make_parts(files, parts, recipe, jobs):
        made[number] = part
        done_bytes += files[number].size
        progress(done_bytes, sum(part.tokens for part in made.values()))
    ordered = tuple(made[number] for number in range(len(files)))
    path = folder / TOKENS_FILE
    temporary = folder / f".{TOKENS_FILE}.tmp"
    with temporary.open("wb") as out:
        for number in range(len(files)):
            with (parts / f"{number:06d}.bin").open("rb") as source:
                shutil.copyfileobj(source, out, 1 << 20)
        out.flush()
        os.fsync(out.fileno())
    os.replace(temporary, path)
    width = recipe.dtype.itemsize
    checksums = tuple(checksums_of(path))
    index = Index(recipe.vocab_size, width, recipe.separator, ordered, checksums)
    index.write(folder)
    shutil.rmtree(parts)
    return index


def _make_parts(
    files: Sequence[TextFile], parts: Path, recipe: Recipe, jobs: int
) -> Iterator[tuple[int, Part]]:
    """(number, part) of each file as it is done."""
    waiting = []
    for number, file in enumerate(files):
        kept = _kept(parts / f"{number:06d}", file, recipe)
        if kept is None:
            waiting.append(number)
        else:
            yield number, kept
    # The tokenizer has threads of its own, which a forked process would not have.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max(1, min(jobs, len(waiting))), context) as pool:
        running = {
            pool.submit(make_part, files[number], parts / f"{number:06d}", recipe): number
            for number in waiting
        }
        try:
            for future in as_completed(running):
                yield running[future], future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def make_part(file: TextFile, stem: Path, recipe: Recipe) -> Part:
    """Tokenise one file to ``STEM.bin``, and leave the record that says so in ``STEM.json``."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(recipe.tokenizer)
    # All of a document and nothing but it: a file may carry settings for batches of a model, and a
    # text that spells the separator must not end there.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    end = np.array([recipe.separator], dtype=recipe.dtype)
    tokens = count = 0
    path = stem.with_suffix(".bin")
    with path.open("wb") as out:
        for batch in _batches(documents(file, recipe.field)):
            for encoding in tokenizer.encode_batch(batch, add_special_tokens=False):
                ids = np.array(encoding.ids, dtype=np.int64).astype(recipe.dtype)
                out.write(ids.tobytes() + end.tobytes())
                tokens += len(ids) + 1
                count += 1
        out.flush()
        os.fsync(out.fileno())
    part = Part(file.name, tokens, count)
    record = {**_origin(file, recipe), **asdict(part), "checksums": list(checksums_of(path))}
    replace_file(stem.with_suffix(".json"), json.dumps(record).encode())
    return part


def _batches(texts: Iterator[str]) -> Iterator[list[str]]:
    batch = []
    for text in texts:
        batch.append(text)
        if len(batch) == _BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


def _origin(file: TextFile, recipe: Recipe) -> dict[str, Any]:
    """What a part was made from."""
    stamp = file.path.stat()
    source = [str(file.path), stamp.st_size, stamp.st_mtime_ns]
    return {"source": source, "recipe": recipe.digest}


def _kept(stem: Path, file: TextFile, recipe: Recipe) -> Part | None:
    """The part of an earlier run, where it is whole and still what this run would make."""
    try:
        record = json.loads(stem.with_suffix(".json").read_bytes())
        checksums = record.pop("checksums")
        part = Part(record.pop("name"), record.pop("tokens"), record.pop("documents"))
        is_same = record == _origin(file, recipe) and part.name == file.name
        return (
            part if is_same and checksums == list(checksums_of(stem.with_suffix(".bin"))) else None
        )
    except (OSError, ValueError, KeyError, AttributeError):
        return None  # an earlier run did not get this far
