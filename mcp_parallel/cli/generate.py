"""``mcp-parallel generate``: continue a text with a trained model."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the ``generate`` command."""
    parser = subparsers.add_parser(
        "generate",
        help="continue a text with a trained model",
        description="Load a checkpoint of any layout on this process and print a continuation.",
    )
    parser.add_argument("source", metavar="RUN_OR_CHECKPOINT", help="run folder or step folder")
    parser.add_argument("--prompt", default="def ", help="text to continue (default: 'def ')")
    parser.add_argument("--max-new-tokens", type=int, default=200, metavar="N")
    parser.add_argument(
        "--temperature", type=float, default=0.8, metavar="T", help="0 is greedy (default: 0.8)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the sampling (default: 0)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Find and verify the checkpoint before torch is imported, then print the continuation."""
    from mcp_parallel.errors import OK, ConfigError

    problems = []
    if args.max_new_tokens < 1:
        problems.append(f"generate: --max-new-tokens must be >= 1, got {args.max_new_tokens}")
    if not 0 <= args.temperature < float("inf"):
        problems.append(f"generate: --temperature must be >= 0 and finite, got {args.temperature}")
    if not args.prompt:
        problems.append("generate: --prompt must hold at least one character, got an empty text")
    if problems:
        raise ConfigError(problems)
    checkpoint = find_checkpoint(Path(args.source))
    _refuse_other_than_text(checkpoint)

    from mcp_parallel.generate import Codec, continue_tokens, load_model, show

    model, config, step = load_model(checkpoint)
    codec = Codec.of(config)
    tokens = continue_tokens(
        model,
        codec.encode(args.prompt),
        num_new=args.max_new_tokens,
        seq_len=config.model.seq_len,
        num_tokens=codec.num_tokens,
        temperature=args.temperature,
        seed=args.seed,
    )
    show(args.prompt, codec.decode(tokens), step, as_json=args.json)
    return OK


def _refuse_other_than_text(checkpoint: Path) -> None:
    from mcp_parallel.checkpoint.manifest import Manifest
    from mcp_parallel.config import Config
    from mcp_parallel.errors import ConfigError
    from mcp_parallel.model.traits import traits_of

    model = Config.from_mapping(Manifest.read(checkpoint).extra["config"]).model
    if not traits_of(model).continues_text:
        problem = (
            "generate: RUN_OR_CHECKPOINT must hold a model that reads text, got one of family "
            f"{model.family} in {str(checkpoint)!r}; its accuracy is in the run's metrics.jsonl"
        )
        raise ConfigError([problem])


def find_checkpoint(source: Path) -> Path:
    """The step folder itself, or the newest one of a run folder that verifies.

    Raises:
        ConfigError: there is none, or the one named is damaged.
    """
    from mcp_parallel.checkpoint.format import CheckpointError
    from mcp_parallel.checkpoint.manifest import FILE_NAME
    from mcp_parallel.checkpoint.steps import find_latest, verify
    from mcp_parallel.errors import ConfigError

    try:
        if (source / FILE_NAME).exists():
            verify(source)
            return source
        found = find_latest(source / "checkpoints") if source.is_dir() else None
    except CheckpointError as error:
        raise ConfigError([f"generate: {error}"]) from error
    if found is None:
        problem = (
            f"generate: RUN_OR_CHECKPOINT must be a run folder with a whole checkpoint, or a step "
            f"folder, got {str(source)!r}; train first: mcp-parallel train --preset tiny"
        )
        raise ConfigError([problem])
    return found
