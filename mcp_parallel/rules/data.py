"""Rules about files: the data and the checkpoint to resume from. No torch, no numpy."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mcp_parallel.config import Config
from mcp_parallel.data import files
from mcp_parallel.errors import shown
from mcp_parallel.rules.problem import Problem

# Both ends of a token file; the rest is checked batch by batch while training.
_PEEKED_BYTES = 1 << 20

_DEFAULT_DATA: dict[str, Any] = {"data.path": None}


def data_problems(config: Config) -> Iterator[Problem]:
    """Data that is absent, empty, too short for one sample, or of another vocabulary."""
    try:
        yield from _data_problems(config)
    except OSError as error:
        name = shown(error.filename or config.data.path)
        yield _problem("be readable", f"{error.strerror or 'an error'} for {name}")


def _data_problems(config: Config) -> Iterator[Problem]:
    path, vocab_size = config.data.path, config.model.vocab_size
    if path is None:
        tokens = _total(files.stdlib_files(), config.model.seq_len)
        if tokens == 0:
            name = shown(str(files.stdlib_folder()))
            yield _problem(
                "be given where Python has no library source", f"null and no *.py in {name}"
            )
    else:
        kind = files.kind_of(path)
        if not path or kind == "missing":
            yield _problem("name a file or folder that exists", shown(path))
            return
        if kind == "special":
            yield _problem("name a file or a folder", f"{shown(path)}, a device, socket or pipe")
            return
        if kind == "tokens":
            yield from _token_file_problems(config, Path(path).expanduser())
            return
        location = Path(path).expanduser()
        if kind == "folder":
            tokens = _total(files.text_files(location), config.model.seq_len)
        else:
            if not files.is_text(location):
                yield _problem("be text (or end in .bin)", f"{shown(path)} with NUL bytes")
                return
            tokens = location.stat().st_size
    if tokens:
        yield from _length_problems(config, tokens)
    elif path is not None:
        yield _problem("hold some text", f"{shown(path)} with none")
    if vocab_size < 256:
        yield Problem(
            "vocab_size of bytes",
            "model.vocab_size",
            "be at least 256 for text read as bytes",
            str(vocab_size),
            ({"model.vocab_size": 256},),
        )


def _total(corpus: Iterator[files.TextFile], seq_len: int) -> int:
    """Tokens of the corpus, files and the newline between them; stops when they are enough."""
    tokens = 0
    for file in corpus:
        tokens += file.size + (tokens > 0)
        if tokens > seq_len:
            break
    return tokens


def _length_problems(config: Config, tokens: int) -> Iterator[Problem]:
    seq_len, shorter = config.model.seq_len, tokens - 1
    if tokens > seq_len:
        return
    name = "the default text" if config.data.path is None else shown(config.data.path)
    yield Problem(
        "data too short",
        "data.path",
        f"hold at least seq_len + 1 = {seq_len + 1} tokens",
        f"{tokens} in {name}",
        (({"model.seq_len": shorter},) if shorter > 0 else ())
        + ((_DEFAULT_DATA,) if config.data.path is not None else ())
        or ({"model.seq_len": 1},),
    )


def _token_file_problems(config: Config, path: Path) -> Iterator[Problem]:
    width = files.token_width(config.model.vocab_size)
    size, name = path.stat().st_size, shown(config.data.path)
    if size == 0:
        yield _problem("hold some tokens", f"{name} with none")
        return
    if size % width:
        rule = f"hold whole uint{8 * width} tokens"
        yield _problem(rule, f"{size} bytes, no multiple of {width}, in {name}")
        return
    yield from _length_problems(config, size // width)
    largest = _largest_token(path, width, size)
    if largest >= config.model.vocab_size:
        yield Problem(
            "token out of vocabulary",
            "data.path",
            f"hold tokens below vocab_size = {config.model.vocab_size}",
            f"token {largest} in {name}",
            (*_larger_vocabulary(largest, width), _DEFAULT_DATA),
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


def _problem(rule: str, got: str) -> Problem:
    return Problem(f"data must {rule}", "data.path", rule, got, (_DEFAULT_DATA,))


def resume_problems(config: Config) -> Iterator[Problem]:
    """A checkpoint to resume from that is not there."""
    resume = config.checkpoint.resume
    if resume in ("never", "auto") or (resume and files.kind_of(resume) == "folder"):
        return
    yield Problem(
        "resume",
        "checkpoint.resume",
        "be never, auto or a checkpoint folder that exists",
        shown(resume),
        ({"checkpoint.resume": "auto"}, {"checkpoint.resume": "never"}),
    )
