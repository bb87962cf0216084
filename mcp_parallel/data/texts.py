"""All text of a run: one corpus or a mixture, and what is held out of it."""

from __future__ import annotations

from dataclasses import dataclass

from mcp_parallel.config import Config
from mcp_parallel.data.batch import BatchSource
from mcp_parallel.data.corpus import Corpus, open_source
from mcp_parallel.data.held_out import split
from mcp_parallel.data.shares import parse_mixture, units_of
from mcp_parallel.errors import shown


@dataclass(frozen=True)
class Texts:
    """What a run reads, opened."""

    corpora: tuple[Corpus, ...]
    """To train on."""
    units: tuple[int, ...] = (1,)
    """The share of each."""
    held_out: tuple[Corpus, ...] = ()
    """To measure."""

    def source(self, config: Config) -> BatchSource:
        """The batches of a run."""
        return BatchSource(
            self.corpora,
            config.data.seed,
            config.model.seq_len,
            config.train.global_batch_size,
            config.data.document_separator,
            units=self.units,
            held_out=self.held_out,
        )


def open_texts(config: Config) -> Texts:
    """The text that ``config.data`` names.

    Raises:
        ValueError: it is not there, broken, too short to hold a part of it out, or a mixture of
            tokens of several tokenizers.
        OSError: a file cannot be read.
    """
    data, model = config.data, config.model
    if data.mixture is None:
        corpora, units = (open_source(data, model, "data.path", data.path),), (1,)
    else:
        shares = parse_mixture(data.mixture)
        if shares is None:
            raise ValueError(f"data: data.mixture must be shares, got {shown(data.mixture)}")
        units = tuple(units_of(shares))
        corpora = tuple(open_source(data, model, "data.mixture", s.path) for s in shares)
    held_out: tuple[Corpus, ...] = ()
    if data.validation_path is not None:
        held_out = (open_source(data, model, "data.validation_path", data.validation_path),)
    _refuse_several_tokenizers((*corpora, *held_out))
    if data.validation_share > 0:
        own = data.document_separator
        pairs = [
            split(corpus, data.validation_share, corpus.separator if own is None else own)
            for corpus in corpora
        ]
        corpora, held_out = tuple(p[0] for p in pairs), tuple(p[1] for p in pairs)
    return Texts(corpora, units, held_out)


def _refuse_several_tokenizers(corpora: tuple[Corpus, ...]) -> None:
    known = {corpus.tokenizer: corpus.names[0] for corpus in corpora if corpus.tokenizer}
    if len(known) > 1:
        first, second = list(known.values())[:2]
        raise ValueError(
            f"data: sources must be tokens of one tokenizer, got {first!a} and {second!a} of two; "
            "make them with mcp-parallel data --tokenizer and the same file"
        )
