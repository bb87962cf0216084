"""Text generation on one process from a checkpoint of any layout."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from mcp_parallel.checkpoint.io import load
from mcp_parallel.checkpoint.manifest import Manifest
from mcp_parallel.checkpoint.planning import LocalChunk
from mcp_parallel.config import Config, ParallelConfig
from mcp_parallel.data.sources import named_sources
from mcp_parallel.errors import ConfigError
from mcp_parallel.layout import Layout
from mcp_parallel.model.stage import StageModel
from mcp_parallel.parallel.mesh import build_mesh
from mcp_parallel.parallel.parallelize import build_stages
from mcp_parallel.parallel.precision import Precision
from mcp_parallel.presets import num_parameters

BYTE_VOCAB = 256
# One token of a smaller model is less work than waking a second thread, on busy cores far less.
_ONE_THREAD_BELOW = 50_000_000


@dataclass(frozen=True)
class Codec:
    """Text as the model's tokens and back: UTF-8 bytes, or numbers for a model of a token file."""

    num_tokens: int
    """Tokens that may be sampled."""
    is_text: bool

    @classmethod
    def of(cls, config: Config) -> Codec:
        """The codec of the data that the model was trained on."""
        if any(source.holds_tokens for source in named_sources(config.data)):
            return cls(config.model.vocab_size, is_text=False)
        return cls(min(BYTE_VOCAB, config.model.vocab_size), is_text=True)

    def encode(self, prompt: str) -> list[int]:
        """Tokens of ``prompt``.

        Raises:
            ConfigError: a token-file model and something that is not numbers of its vocabulary.
        """
        if self.is_text:
            # Bytes that the locale could not read as text came in as surrogates.
            return list(prompt.encode("utf-8", errors="surrogateescape"))
        words = prompt.replace(",", " ").split()
        if not words or not all(w.isdecimal() and int(w) < self.num_tokens for w in words):
            problem = (
                f"generate: --prompt must be token numbers below {self.num_tokens}, as in "
                f"'12 7 99', since the model was trained on a token file, got {prompt!r}"
            )
            raise ConfigError([problem])
        return [int(word) for word in words]

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of ``tokens``; bytes that are no UTF-8 show as escapes."""
        if self.is_text:
            return bytes(tokens).decode("utf-8", errors="backslashreplace")
        return "".join(f" {token}" for token in tokens)


def load_model(checkpoint: Path) -> tuple[StageModel, Config, int]:
    """The whole model of a verified step folder, its run, and the steps it was trained."""
    manifest = Manifest.read(checkpoint)
    saved = Config.from_mapping(manifest.extra["config"])
    # A checkpoint holds the weights as they are kept: in 16 bits one copy of them is enough here.
    precision = "fp32" if Precision.of(saved).is_narrow else saved.train.precision
    train = replace(saved.train, precision=precision)
    config = replace(saved, parallel=ParallelConfig(), train=train)
    if num_parameters(config.model) < _ONE_THREAD_BELOW and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    mesh = build_mesh(Layout(), torch.device("cpu"))
    assert mesh is not None
    stage = build_stages(config, mesh)[0]
    chunks = [
        LocalChunk(f"model.{shard.name}", shard.local, shard.global_shape, shard.offsets)
        for shard in stage.shards
    ]
    load(checkpoint, chunks, fingerprint=manifest.fingerprint)
    return stage.model.eval(), config, manifest.step


@torch.inference_mode()
def continue_tokens(
    model: StageModel,
    prompt: Sequence[int],
    *,
    num_new: int,
    seq_len: int,
    num_tokens: int,
    temperature: float,
    seed: int,
) -> list[int]:
    """Sample ``num_new`` tokens after ``prompt``.

    Args:
        model: the whole model.
        prompt: at least one token.
        num_new: how many to add.
        seq_len: the model sees this many of the last tokens; the window is computed anew for each
            token, which costs one forward a token.
        num_tokens: tokens that may be sampled, 0 to ``num_tokens`` - 1.
        temperature: logits are divided by it; 0 takes the most likely token.
        seed: of the sampling; the same seed gives the same tokens.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    for _ in range(num_new):
        window = torch.tensor([tokens[-seq_len:]])
        logits = model(window)[0, -1, :num_tokens]
        tokens.append(_choose(logits, temperature, generator))
    return tokens[len(prompt) :]


def _choose(logits: Tensor, temperature: float, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    # Shifting by the maximum first keeps tiny temperatures finite.
    weights = ((logits - logits.max()).double() / temperature).softmax(-1)
    return int(torch.multinomial(weights, 1, generator=generator))


def show(prompt: str, continuation: str, step: int, *, as_json: bool) -> None:
    """Print prompt and continuation; what the terminal cannot show appears as escapes."""
    if as_json:
        print(json.dumps({"prompt": prompt, "continuation": continuation, "step": step}))  # noqa: T201
        return
    encoding = sys.stdout.encoding or "ascii"
    text = prompt + continuation
    print(text.encode(encoding, errors="backslashreplace").decode(encoding))  # noqa: T201
