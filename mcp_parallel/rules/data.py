"""Rules about files: the data and the checkpoint to resume from. No torch, no numpy."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mcp_parallel.config import Config
from mcp_parallel.data import files, storage
from mcp_parallel.data.prepare.index import INDEX_FILE, TOKENS_FILE, Index, TokenFileError
from mcp_parallel.data.sources import Source, named_sources
from mcp_parallel.errors import shown_path
from mcp_parallel.rules.mixture import mixture_problems
from mcp_parallel.rules.problem import Problem

# Both ends of a token file; the rest is checked batch by batch while training.
_PEEKED_BYTES = 1 << 20


def data_problems(config: Config) -> Iterator[Problem]:
    """Data that is absent, empty, too short for one sample, or of another vocabulary."""
    yield from mixture_problems(config)
    for source in named_sources(config.data):
        yield from _problems_of(config, source)


def has_index(path: str) -> bool:
    """Whether a token file came from ``mcp-parallel data``, which says where documents end."""
    if storage.is_url(path):
        return True
    location = storage.local_path(path)
    return location.name == TOKENS_FILE and (location.parent / INDEX_FILE).is_file()


def _problems_of(config: Config, source: Source) -> Iterator[Problem]:
    try:
        yield from _source_problems(config, source)
    except OSError as error:
        name = shown_path(error.filename or source.path)
        yield _problem(source, "be readable", f"{error.strerror or 'an error'} for {name}")


def _source_problems(config: Config, source: Source) -> Iterator[Problem]:
    path, vocab_size = source.path, config.model.vocab_size
    if path is None:
        tokens = _total(files.stdlib_files(), config.model.seq_len)
        if tokens == 0:
            name = shown_path(files.stdlib_folder())
            rule = "be given where Python has no library source"
            yield _problem(source, rule, f"null and no *.py in {name}")
    else:
        kind = files.kind_of(path)
        if kind == "url":
            yield from _url_problems(source, path)
            return
        if not path or kind == "missing":
            yield _problem(source, "name a file or folder that exists", shown_path(path))
            return
        if kind == "special":
            got = f"{shown_path(path)}, a device, socket or pipe"
            yield _problem(source, "name a file or a folder", got)
            return
        location = storage.local_path(path)
        if kind == "tokens":
            yield from _token_file_problems(config, source, location)
            return
        if kind == "folder" and all((location / n).exists() for n in (INDEX_FILE, TOKENS_FILE)):
            # Its text files are the index and the tokenizer: nobody means to train on them.
            rule = f"end in /{TOKENS_FILE} where mcp-parallel data made the folder"
            yield _problem(source, rule, shown_path(path), f"{path.rstrip('/')}/{TOKENS_FILE}")
            return
        if kind == "folder":
            tokens = _total(files.text_files(location), config.model.seq_len)
        else:
            if not files.is_text(location):
                got = f"{shown_path(path)} with NUL bytes"
                yield _problem(source, "be text (or end in .bin)", got)
                return
            tokens = location.stat().st_size
    if tokens:
        yield from _length_problems(config, source, tokens)
    elif path is not None:
        yield _problem(source, "hold some text", f"{shown_path(path)} with none")
    if vocab_size < 256:
        yield Problem(
            "vocab_size of bytes",
            "model.vocab_size",
            "be at least 256 for text read as bytes",
            str(vocab_size),
            ({"model.vocab_size": 256},),
        )


def _url_problems(source: Source, url: str) -> Iterator[Problem]:
    """What no network is needed for; that it can be reached is seen before the ranks start."""
    problem = storage.url_problem(url)
    if problem is not None:
        yield _problem(source, *problem)
    elif url.rpartition("/")[2] != TOKENS_FILE:
        rule = f"end in /{TOKENS_FILE} where it is a URL, as mcp-parallel data --out URL writes it"
        yield _problem(source, rule, shown_path(url))


def _total(corpus: Iterator[files.TextFile], seq_len: int) -> int:
    """Tokens of the corpus, files and the newline between them; stops when they are enough."""
    tokens = 0
    for file in corpus:
        tokens += file.size + (tokens > 0)
        if tokens > seq_len:
            break
    return tokens


def _length_problems(config: Config, source: Source, tokens: int) -> Iterator[Problem]:
    seq_len, shorter = config.model.seq_len, tokens - 1
    needed = seq_len + 1 if source.is_trained_on else 2
    if tokens >= needed:
        return
    name = "the default text" if source.path is None else shown_path(source.path)
    rule = f"seq_len + 1 = {needed}" if source.is_trained_on else "2"
    yield Problem(
        "data too short",
        source.key,
        f"hold at least {rule} tokens",
        f"{tokens} in {name}",
        (({"model.seq_len": shorter},) if shorter > 0 and source.is_trained_on else ())
        + (_default(source) if source.path is not None else ())
        or ({"model.seq_len": 1},),
    )


def _token_file_problems(config: Config, source: Source, path: Path) -> Iterator[Problem]:
    size, name = path.stat().st_size, shown_path(source.path)
    assert source.path is not None
    if has_index(source.path):
        yield from _indexed_problems(config, source, path, size)
        return
    if config.data.verify == "all":
        yield Problem(
            "verify without index",
            "data.verify",
            f"be read or size where {name} has no index.json",
            "all",
            ({"data.verify": "read"}, {"data.verify": "size"}),
        )
    width = files.token_width(config.model.vocab_size)
    if size == 0:
        yield _problem(source, "hold some tokens", f"{name} with none")
        return
    if size % width:
        rule = f"hold whole uint{8 * width} tokens"
        yield _problem(source, rule, f"{size} bytes, no multiple of {width}, in {name}")
        return
    yield from _length_problems(config, source, size // width)
    largest = _largest_token(path, width, size)
    if largest >= config.model.vocab_size:
        yield Problem(
            "token out of vocabulary",
            source.key,
            f"hold tokens below vocab_size = {config.model.vocab_size}",
            f"token {largest} in {name}",
            (*_larger_vocabulary(largest, width), *_default(source)),
        )


def _indexed_problems(config: Config, source: Source, path: Path, size: int) -> Iterator[Problem]:
    """A token file that is not what its index says, or of a vocabulary that the model lacks."""
    name = shown_path(source.path)
    try:
        index = Index.read(path.parent)
    except TokenFileError:
        rule = "have a whole index.json beside it (run mcp-parallel data again)"
        yield _problem(source, rule, f"{name} with a broken one")
        return
    if size != index.num_bytes:
        rule = f"hold the {index.num_bytes} bytes that its index.json says"
        yield _problem(source, rule, f"{size} in {name}")
        return
    yield from _length_problems(config, source, index.tokens)
    if index.vocab_size > config.model.vocab_size:
        yield Problem(
            "vocabulary of tokens",
            source.key,
            f"hold tokens below vocab_size = {config.model.vocab_size}",
            f"a vocabulary of {index.vocab_size} in {name}",
            ({"model.vocab_size": index.vocab_size}, *_default(source)),
        )


def _larger_vocabulary(largest: int, width: int) -> Iterator[dict[str, Any]]:
    if largest < 1 << 24 and files.token_width(largest + 1) == width:
        yield {"model.vocab_size": largest + 1}


def _largest_token(path: Path, width: int, size: int) -> int:
    """The largest token in both ends of the file."""
    code = next(code for code in "HILQ" if array(code).itemsize == width)
    tokens = array(code)
    with path.open("rb") as file:
        tokens.frombytes(file.read(min(size, _PEEKED_BYTES)))
        if size > _PEEKED_BYTES:
            file.seek(max(size - _PEEKED_BYTES, _PEEKED_BYTES))
            tokens.frombytes(file.read())
    if sys.byteorder == "big":
        tokens.byteswap()
    return max(tokens)


def _default(source: Source) -> tuple[Mapping[str, Any], ...]:
    """The way out that always works: without the source."""
    return ({source.key: None},)


def _problem(source: Source, rule: str, got: str, path: str | None = None) -> Problem:
    """Of a source's path, which ``path`` would mend; None is the way out that always does."""
    ways = _default(source) if path is None else ({source.key: path},)
    return Problem(f"data must {rule}", source.key, rule, got, ways)


def resume_problems(config: Config) -> Iterator[Problem]:
    """A checkpoint to resume from that is not there."""
    resume = config.checkpoint.resume
    if resume in ("never", "auto") or (resume and files.kind_of(resume) == "folder"):
        return
    yield Problem(
        "resume",
        "checkpoint.resume",
        "be never, auto or a checkpoint folder that exists",
        shown_path(resume),
        ({"checkpoint.resume": "auto"}, {"checkpoint.resume": "never"}),
    )
