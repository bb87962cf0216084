"""``mcp-parallel data``: make a token file of text and JSONL, or check one; by ``tokenizers``."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from pathlib import Path

from mcp_parallel.errors import OK, ConfigError


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the ``data`` command."""
    parser = subparsers.add_parser(
        "data",
        help="tokenise text and JSONL for training",
        description="Tokenise a text file, a .jsonl file or a folder of them to one checksummed "
        "token file; started again after a stop it goes on. --verify checks a finished one.",
    )
    parser.add_argument("source", metavar="SOURCE", nargs="?", help="file or folder")
    parser.add_argument("--out", metavar="DIR", help="folder of the token file")
    parser.add_argument("--tokenizer", metavar="FILE", help="a Hugging Face tokenizer.json")
    parser.add_argument(
        "--train-vocab", type=int, metavar="N", help="train a byte-level BPE tokenizer of N tokens"
    )
    parser.add_argument("--field", default="text", help="key of the text in JSONL (default: text)")
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
    from mcp_parallel.data.prepare.documents import SourceError
    from mcp_parallel.data.prepare.index import Index, TokenFileError, verify

    try:
        if args.verify is not None:
            folder, index = Path(args.verify), verify(Path(args.verify))
        else:
            _check(args)
            folder, index = Path(args.out), _build(args)
    except (SourceError, TokenFileError) as error:
        raise ConfigError([str(error)]) from error
    except OSError as error:
        raise ConfigError([f"data: {error.filename!a}: {error.strerror}"]) from error
    assert isinstance(index, Index)
    _report(folder, index, as_json=args.json)
    return OK


def _check(args: argparse.Namespace) -> None:
    problems = []
    if args.source is None or args.out is None:
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


def _build(args: argparse.Namespace) -> object:
    from mcp_parallel.data.prepare import build as steps
    from mcp_parallel.data.prepare.documents import find_sources

    files, left_out = find_sources(args.source)
    if left_out:
        names = ", ".join(left_out[:5]) + (", ..." if len(left_out) > 5 else "")
        sys.stderr.write(f"data: {len(left_out)} files are hidden, empty or no text: {names}\n")
    folder = Path(args.out)
    folder.mkdir(parents=True, exist_ok=True)
    if args.tokenizer is not None:
        tokenizer = steps.load_tokenizer(Path(args.tokenizer))
    else:
        tokenizer = steps.trained_tokenizer(files, folder, args.field, args.train_vocab)
    recipe = steps.recipe_of(tokenizer, args.field, args.separator)
    with _Bar(sum(file.size for file in files)) as bar:
        return steps.build(files, folder, recipe, args.jobs, bar.show)


class _Bar:
    """Bytes done, on a terminal; nothing elsewhere."""

    def __init__(self, total_bytes: int) -> None:
        self._bar = None
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import Progress

            self._bar = Progress(console=Console(file=sys.stderr))
            self._task = self._bar.add_task("tokens", total=total_bytes)

    def __enter__(self) -> _Bar:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, done_bytes: int, tokens: int) -> None:
        if self._bar is not None:
            text = f"{tokens:,} tokens"
            self._bar.update(self._task, completed=done_bytes, description=text)


def _report(folder: Path, index: object, *, as_json: bool) -> None:
    from mcp_parallel.data.prepare.index import TOKENS_FILE, Index

    assert isinstance(index, Index)
    path = folder / TOKENS_FILE
    documents = sum(part.documents for part in index.parts)
    settings = {
        "data.path": str(path),
        "data.document_separator": index.separator,
        "model.vocab_size": index.vocab_size,
    }
    if as_json:
        outcome = {"tokens": index.tokens, "documents": documents, "files": len(index.parts)}
        sys.stdout.write(json.dumps({**outcome, "set": settings}) + "\n")
        return
    sys.stdout.write(
        f"{index.tokens:,} tokens of {documents:,} documents in {len(index.parts):,} files, "
        f"{index.width} bytes each, vocabulary {index.vocab_size:,}\n"
        f"next: mcp-parallel train --set data.path={path} "
        f"--set model.vocab_size={index.vocab_size}\n"
    )
