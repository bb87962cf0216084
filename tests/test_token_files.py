"""Token files with an index: what is found when one is opened, and what when it is read."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from configs import assert_ways_out, config_of, names
from token_files import config_for, put_tokens

from mcp_parallel.check import check, find_problems
from mcp_parallel.config import Config
from mcp_parallel.data.prepare import index as index_module
from mcp_parallel.data.prepare.index import Index, TokenFileError
from mcp_parallel.data.source import open_data


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(index_module, "_MIN_BLOCK_BYTES", 256)


def test_a_flipped_bit_is_found_when_its_block_is_read(tmp_path):
    tokens = put_tokens(f"{tmp_path}")
    path = tmp_path / "tokens.bin"
    content = bytearray(path.read_bytes())
    content[600] ^= 4
    path.write_bytes(content)
    config = config_for(str(tmp_path))
    check(config)
    corpus = open_data(config)
    assert np.array_equal(corpus.tokens[:256], tokens[:256])
    with pytest.raises(TokenFileError, match="between 512 and 768"):
        corpus.tokens[250:260]
    with pytest.raises(TokenFileError, match="between 512 and 768"):
        open_data(config_for(str(tmp_path), data__verify="all"))
    assert open_data(config_for(str(tmp_path), data__verify="size")).tokens[300] == tokens[300] ^ 4


@pytest.mark.parametrize(
    "change, name, words",
    [
        ("cut", "data must hold the 3000 bytes that its index.json says", "got 2998 in "),
        ("index", "data must have a whole index.json beside it", "with a broken one"),
        ("vocabulary", "vocabulary of tokens", "got a vocabulary of 300 in "),
        ("short", "data too short", "got 3 in "),
    ],
)
def test_a_token_file_that_cannot_be_used_is_refused_before_any_process(
    tmp_path, change, name, words
):
    put_tokens(f"{tmp_path}", 3 if change == "short" else 1500)
    config = config_for(str(tmp_path))
    if change == "cut":
        os.truncate(tmp_path / "tokens.bin", 2998)
    if change == "index":
        (tmp_path / "index.json").write_text("{")
    if change == "vocabulary":
        config = config_of(data__path=f"{tmp_path}/tokens.bin")
    [problem] = [p for p in find_problems(config) if p.name.startswith(name)]
    assert words in str(problem)
    assert_ways_out(config)


def test_the_folder_of_a_token_file_is_not_taken_for_text(tmp_path):
    # Longer than a value is shown: the path to write is there to be copied.
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    put_tokens(f"{folder}")
    config = config_of(data__path=f"{folder}/", model__vocab_size=300, model__seq_len=16)
    [problem] = find_problems(config)
    assert "data.path must end in /tokens.bin where mcp-parallel data made" in str(problem)
    assert f"got '{folder}/'; use data.path = {folder}/tokens.bin" in str(problem)
    assert_ways_out(config)


def test_all_needs_an_index(tmp_path):
    np.arange(256, dtype="<u2").tofile(tmp_path / "own.bin")
    config = config_of(data__path=str(tmp_path / "own.bin"), data__verify="all")
    assert names(config) == ["verify without index"]
    assert_ways_out(config)
    with pytest.raises(TokenFileError, match=r"with its index\.json where data\.verify = all"):
        open_data(config)


def test_sources_of_two_tokenizers_are_refused(tmp_path):
    for number in range(2):
        put_tokens(f"{tmp_path}/{number}")
        index = replace(Index.read(tmp_path / str(number)), tokenizer=str(number))
        (tmp_path / str(number) / "index.json").write_bytes(index.to_bytes())
    config = Config.from_mapping(
        {
            "model": {"vocab_size": 300, "seq_len": 16},
            "data": {"mixture": f"0.5 {tmp_path}/0/tokens.bin, 0.5 {tmp_path}/1/tokens.bin"},
        }
    )
    with pytest.raises(ValueError, match="must be tokens of one tokenizer"):
        open_data(config)


def test_the_width_of_the_index_is_read_whatever_the_model_has(tmp_path):
    """Two-byte tokens under a vocabulary that would take four."""
    tokens = put_tokens(f"{tmp_path}")
    config = config_of(
        data__path=str(Path(tmp_path) / "tokens.bin"), model__vocab_size=100_000, model__seq_len=16
    )
    check(config)
    assert np.array_equal(open_data(config).tokens[:], tokens)
