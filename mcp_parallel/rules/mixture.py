"""Rules of mixtures and of what is held out: shares that sum, and keys that exclude each other.

No torch, no numpy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mcp_parallel.config import Config
from mcp_parallel.data.shares import EXAMPLE, Share, normalised, parse_mixture, units_of, written
from mcp_parallel.data.sources import named_sources
from mcp_parallel.errors import joined, shown, shown_path
from mcp_parallel.rules.problem import Problem

_NO_MIXTURE = {"data.mixture": None}


def mixture_problems(config: Config) -> Iterator[Problem]:
    """What is wrong with the sources as they are written, whatever lies there."""
    data = config.data
    if data.mixture is not None:
        if data.path is not None:
            yield Problem(
                "path beside mixture",
                "data.mixture",
                "be null where data.path is given",
                shown(data.mixture),
                (_NO_MIXTURE, {"data.path": None}),
            )
        yield from _share_problems(data.mixture)
    if data.validation_share > 0 and data.validation_path is not None:
        yield Problem(
            "validation twice",
            "data.validation_share",
            "be 0 where data.validation_path is given",
            shown(data.validation_share),
            ({"data.validation_share": 0.0}, {"data.validation_path": None}),
        )
    kinds = {source.holds_tokens for source in named_sources(data)}
    if len(kinds) > 1:
        key = "data.validation_path" if data.mixture is None else "data.mixture"
        ways = [{key: None}] if data.mixture is None else [{**_NO_MIXTURE, **_NO_VALIDATION}]
        rule = "go with the other sources: all of them text, or all token files"
        yield Problem("text beside tokens", key, rule, "both", tuple(ways))


_NO_VALIDATION = {"data.validation_path": None}


def _share_problems(text: str) -> Iterator[Problem]:
    shares = parse_mixture(text)
    if shares is None:
        yield Problem(
            "mixture",
            "data.mixture",
            f"be shares and sources as in {EXAMPLE!a}",
            shown(text),
            (_NO_MIXTURE,),
        )
        return
    paths = [share.path for share in shares]
    twice = next((path for path in paths if paths.count(path) > 1), None)
    if twice is not None:
        rule, got = "name each source once", f"{shown_path(twice)} twice"
        yield Problem("source twice", "data.mixture", rule, got, (_NO_MIXTURE,))
    try:
        units_of(shares)
    except ValueError:
        yield _sum_problem(shares)


def _sum_problem(shares: Sequence[Share]) -> Problem:
    near = normalised(shares)
    numbers = joined([share.text for share in shares], "and")
    total = float(sum(share.share for share in shares))
    rule = "have shares above 0 that sum to 1"
    if near is not None:
        rule += f", of at most 4 decimals ({joined([s.text for s in near], 'and')} do)"
    ways = (_NO_MIXTURE,) if near is None else ({"data.mixture": written(near)}, _NO_MIXTURE)
    got = f"{numbers} in {shown(written(shares))}, which sum to {total:.12g}"
    return Problem("shares", "data.mixture", rule, got, ways)
