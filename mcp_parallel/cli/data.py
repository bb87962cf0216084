"""``mcp-parallel data``: make a token file of text, JSONL and Parquet, or check one."""

from __future__ import annotations

import argparse
import errno
import hashlib
import importlib.util
import json
import os
import shlex
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from mcp_parallel.errors import OK, ConfigError

if TYPE_CHECKING:
    from mcp_parallel.data.prepare.build import Built


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the ``data`` command."""
    parser = subparsers.add_parser(
        "data",
        help="tokenise text, JSONL and Parquet for training",
        description="Tokenise a text, .jsonl or .parquet file or a folder of them to one "
        "checksummed token file; started again after a stop it goes on. --verify checks a finished "
        "one. Each path may be a URL (s3://, hdfs://, memory://), whose keys and options are taken "
        "from the environment alone.",
    )
    parser.add_argument("source", metavar="SOURCE", nargs="?", help="file, folder or URL")
    parser.add_argument("--out", metavar="DIR", help="folder or URL of the token file")
    parser.add_argument("--tokenizer", metavar="FILE", help="a Hugging Face tokenizer.json")
    parser.add_argument(
        "--train-vocab", type=int, metavar="N", help="train a byte-level BPE tokenizer of N tokens"
    )
    parser.add_argument(
        "--field", default="text", help="key or column of the text, JSONL and Parquet (text)"
    )
    parser.add_argument(
        "--skip-bad",
        action="store_true",
        help="leave broken and empty files out, count them and name them in the index; without it "
        "the first one is an error",
    )
    parser.add_argument(
        "--separator",
        default="<|endoftext|>",
        metavar="TOKEN",
        help="token that ends each document (default: <|endoftext|>)",
    )
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="processes"
    )
    parser.add_argument("--verify", metavar="DIR", help="check every byte of a token file")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Build or verify; ``ConfigError`` for a source, a tokenizer or a file that cannot be used."""
    from mcp_parallel.data.prepare.build import Built
    from mcp_parallel.data.prepare.index import TokenFileError, verify
    from mcp_parallel.data.prepare.sources import SourceError
    from mcp_parallel.data.storage import StorageError

    try:
        if args.verify is not None:
            folder, built = args.verify, Built(verify(args.verify), 0)
        else:
            _check(args)
            folder, built = args.out, _build(args)
    except (SourceError, TokenFileError, StorageError) as error:
        raise ConfigError([str(error)]) from error
    except OSError as error:
        raise ConfigError([_words_of(error, str(args.out or args.verify))]) from error
    _report(folder, built, as_json=args.json)
    return OK


def _words_of(error: OSError, folder: str) -> str:
    """A file that cannot be read or written; a full disk names none."""
    place = folder if error.filename is None else os.fsdecode(error.filename)
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    way = "free some space, finished pieces are taken over" if full else "name another, or mend it"
    return f"data: {place!a} must be usable, got {error.strerror or error}; {way}"


def _check(args: argparse.Namespace) -> None:
    problems = []
    if not args.source or not args.out:
        problems.append(
            "data: SOURCE and --out must be given; write for example "
            "mcp-parallel data texts/ --out tokens/ --train-vocab 8192"
        )
    if (args.tokenizer is None) == (args.train_vocab is None):
        problems.append(
            "data: one of --tokenizer and --train-vocab must be given, got "
            f"{'neither' if args.tokenizer is None else 'both'}; use --train-vocab 8192"
        )
    # 256 bytes and the separator are in every vocabulary.
    if args.train_vocab is not None and not 257 <= args.train_vocab <= 1 << 24:
        problems.append(
            f"data: --train-vocab must be at least 257 and at most {1 << 24}, got "
            f"{args.train_vocab}; use 8192"
        )
    if args.jobs < 1:
        problems.append(f"data: --jobs must be at least 1, got {args.jobs}; use 1")
    if importlib.util.find_spec("tokenizers") is None:
        problems.append(
            "data: tokenizers must be installed, got no such package; pip install tokenizers"
        )
    if problems:
        raise ConfigError(problems)


def _build(args: argparse.Namespace) -> Built:
    from mcp_parallel.data import storage
    from mcp_parallel.data.prepare import recipe as recipes
    from mcp_parallel.data.prepare.build import build
    from mcp_parallel.data.prepare.sources import find_sources

    shards, hidden = find_sources(args.source, args.out)
    if hidden:
        names = ", ".join(hidden[:5]) + (", ..." if len(hidden) > 5 else "")
        count = f"{len(hidden)} files are left out, hidden, links to folders or no files"
        sys.stderr.write(f"data: {count}: {names}\n".encode("ascii", "backslashreplace").decode())
    work = _work_folder(args.out)
    work.mkdir(mode=0o700 if storage.is_url(args.out) else 0o777, parents=True, exist_ok=True)
    if args.tokenizer is not None:
        tokenizer = recipes.load_tokenizer(args.tokenizer)
    else:
        tokenizer = recipes.trained_tokenizer(
            shards, work, args.field, args.train_vocab, skip_bad=args.skip_bad
        )
    recipe = recipes.recipe_of(tokenizer, args.field, args.separator)
    with TokenBar(sum(shard.size for shard in shards)) as bar:
        return build(shards, args.out, work, recipe, args.jobs, bar.show, skip_bad=args.skip_bad)


def _work_folder(out: str) -> Path:
    """Where parts are: in the folder itself, or of a URL in the user's cache."""
    from mcp_parallel.data import storage
    from mcp_parallel.data.cache import cache_folder

    if not storage.is_url(out):
        return storage.local_path(out)
    return cache_folder() / f"data-{hashlib.sha256(out.encode()).hexdigest()[:16]}"


class TokenBar:
    """Bytes done, tokens and tokens a second, on a terminal; nothing elsewhere.

    Args:
        total_bytes: of all sources.
        stream: where it is drawn.
    """

    def __init__(self, total_bytes: int, stream: TextIO | None = None) -> None:
        file: TextIO = sys.stderr if stream is None else stream
        self._bar = None
        self._first: tuple[float, int] | None = None
        if file.isatty():
            from rich.console import Console
            from rich.progress import (
                BarColumn,
                DownloadColumn,
                Progress,
                TextColumn,
                TimeRemainingColumn,
            )

            columns = (BarColumn(), DownloadColumn(), TextColumn("{task.description}"))
            self._bar = Progress(*columns, TimeRemainingColumn(), console=Console(file=file))
            self._task = self._bar.add_task("", total=total_bytes)

    def __enter__(self) -> TokenBar:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, done_bytes: int, tokens: int) -> None:
        """Move the bar; tokens that an earlier run made count as done, not as fast."""
        if self._bar is None:
            return
        now_s = time.monotonic()
        first_s, first_tokens = self._first = self._first or (now_s, tokens)
        rate = (tokens - first_tokens) / max(now_s - first_s, 1e-9)
        text = f"{tokens:,} tokens, {rate:,.0f}/s"
        self._bar.update(self._task, completed=done_bytes, description=text)


def _report(folder: str, built: Built, *, as_json: bool) -> None:
    from mcp_parallel.data import storage
    from mcp_parallel.data.prepare.index import TOKENS_FILE

    index = built.index
    path = storage.below(folder, TOKENS_FILE)
    documents = sum(part.documents for part in index.parts)
    settings = {
        "data.path": path,
        "model.vocab_size": index.vocab_size,
    }
    if as_json:
        outcome = {
            "tokens": index.tokens,
            "documents": documents,
            "files": len(index.parts),
            "skipped": [asdict(entry) for entry in index.skipped],
            "pieces_taken_over": built.num_kept,
            "separator": index.separator,
        }
        sys.stdout.write(json.dumps({**outcome, "set": settings}) + "\n")
        return
    counts = f"{index.tokens:,} tokens of {documents:,} documents in {len(index.parts):,} files"
    lines = [f"{counts}, {index.width} bytes each, vocabulary {index.vocab_size:,}"]
    if index.skipped:
        names = ", ".join(entry.name for entry in index.skipped[:5])
        more = ", ..." if len(index.skipped) > 5 else ""
        lines.append(
            f"skipped {len(index.skipped)} broken files (why is in index.json): {names}{more}"
        )
    words = " ".join(f"--set {shlex.quote(f'{key}={value}')}" for key, value in settings.items())
    lines.append(f"next: mcp-parallel train {words}")
    text = "\n".join(lines) + "\n"
    sys.stdout.write(text.encode("ascii", "backslashreplace").decode())
