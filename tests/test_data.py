from __future__ import annotations

import itertools
import os
import sysconfig
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcp_parallel.config import DataConfig, ModelConfig
from mcp_parallel.data import cache, files
from mcp_parallel.data.batch import BatchSource
from mcp_parallel.data.corpus import IGNORED_TARGET, Corpus, open_corpus
from mcp_parallel.data.order import sample_index, sample_indices


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder / "mcp_parallel"


def opened(path, vocab_size=256):
    return open_corpus(DataConfig(path=str(path)), ModelConfig(vocab_size=vocab_size))


def counting(length, vocab_size=65536):
    return Corpus(np.arange(length, dtype=np.uint32), vocab_size)


# --- order ---------------------------------------------------------------------------------------


# 1 to 70: every walk length and bit count of small domains; the rest sit around powers of 2 and 4.
@pytest.mark.parametrize("n", [*range(1, 71), 255, 256, 257, 1023, 1025, 4095, 4096, 4097, 100003])
def test_each_epoch_visits_each_sample_once(n):
    for epoch in (0, 1, 7):
        positions = np.arange(epoch * n, (epoch + 1) * n)
        assert np.array_equal(np.sort(sample_indices(11, positions, n)), np.arange(n))


def test_epochs_and_seeds_have_orders_of_their_own():
    n = 1000
    orders = [
        sample_indices(seed, np.arange(epoch * n, (epoch + 1) * n), n)
        for seed in (0, 1, 2, 2**63 - 1)
        for epoch in range(4)
    ]
    for one, other in itertools.combinations(orders, 2):
        # Two independent random permutations agree in a Poisson(1) number of places:
        # more than 12 has a probability below 1e-10 a pair.
        assert np.count_nonzero(one == other) <= 12


@pytest.mark.parametrize("n", [2, 3, 5, 8, 16, 33])
def test_small_orders_are_even(n):
    """Over many seeds each sample is equally often at each position."""
    trials = 4000
    counts = np.zeros((n, n))
    for seed in range(trials):
        counts[np.arange(n), sample_indices(seed, np.arange(n), n)] += 1
    # Binomial(4000, 1/n), at most 33 * 33 cells: six standard deviations, 1e-6 overall.
    deviation = 6 * np.sqrt(trials / n * (1 - 1 / n))
    assert np.abs(counts - trials / n).max() <= deviation


def test_neighbours_are_torn_apart():
    """Consecutive positions land on unrelated samples: no run of the corpus is read in order."""
    n = 50_000
    order = sample_indices(5, np.arange(n), n)
    # P(order[i + 1] == order[i] + 1) is 1/n: the number of such places is Poisson(1).
    assert np.count_nonzero(np.diff(order) == 1) <= 12
    rank_correlation = np.corrcoef(np.arange(n), order)[0, 1]
    assert abs(rank_correlation) <= 6 / np.sqrt(n)


def test_order_is_the_same_in_every_version_and_on_every_machine():
    """A changed order would silently repeat and skip samples of every run that resumes."""
    assert [sample_index(0, position, 10) for position in range(20)] == KNOWN_SMALL
    assert [sample_index(2**63 - 1, 2**62 + p, 2**61 - 1) for p in range(3)] == KNOWN_LARGE


KNOWN_SMALL = [9, 8, 6, 4, 3, 0, 7, 2, 1, 5, 4, 0, 2, 3, 8, 1, 7, 6, 9, 5]
KNOWN_LARGE = [1542972965761565598, 2003340725041867368, 1883232293515367327]


@given(
    seed=st.integers(0, 2**63 - 1),
    start=st.integers(0, 2**62),
    n=st.integers(1, 2**62 - 1),
)
@settings(max_examples=100, deadline=None)
def test_a_position_alone_decides(seed, start, n):
    positions = np.arange(start, start + 9)
    together = sample_indices(seed, positions, n)
    assert ((together >= 0) & (together < n)).all()
    assert together.tolist() == [sample_index(seed, int(p), n) for p in positions]


@pytest.mark.parametrize("seed, position, n", [(-1, 0, 1), (2**63, 0, 1), (0, -1, 1), (0, 0, 0)])
def test_order_refuses_what_it_cannot_number(seed, position, n):
    with pytest.raises(ValueError, match=r"sample_indices: \w+ must be"):
        sample_index(seed, position, n)


# --- corpus --------------------------------------------------------------------------------------


@given(length=st.integers(0, 60), seq_len=st.integers(1, 20))
@settings(deadline=None)
def test_every_token_but_the_first_is_a_target_once(length, seq_len):
    corpus = counting(length)
    count = corpus.num_samples(seq_len)
    seen = []
    for index in range(count):
        inputs, targets = corpus.sample(index, seq_len)
        assert inputs.dtype == targets.dtype == np.int64
        assert inputs.shape == targets.shape == (seq_len,)
        real = targets != IGNORED_TARGET
        assert real.any()
        assert np.array_equal(inputs[real] + 1, targets[real])
        seen += targets[real].tolist()
    assert seen == list(range(1, length))


def test_a_sample_that_is_not_there_is_refused():
    for index in (-1, 3):
        with pytest.raises(ValueError, match=r"indices must be in \[0, 3\)"):
            counting(31).sample(index, 10)


def test_text_is_its_bytes(tmp_path):
    path = tmp_path / "a caf\u00e9.txt"
    path.write_text("h\u00e9llo", encoding="utf-8")
    assert bytes(opened(path).tokens) == "h\u00e9llo".encode()


def test_folder_is_its_text_in_the_order_of_names(tmp_path):
    folder = tmp_path / "my data"
    for name, content in {
        "b.txt": b"BB",
        "a.txt": b"A",
        "sub/z.md": b"Z",
        "a/c.txt": b"C",
        "empty.txt": b"",
        "image.png": b"\x89PNG\0\0",
        ".hidden": b"no",
        ".git/config": b"no",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    (folder / "loop").symlink_to(folder, target_is_directory=True)
    corpus = opened(folder)
    assert corpus.names == ("a.txt", "b.txt", "a/c.txt", "sub/z.md")
    assert bytes(corpus.tokens) == b"A\nBB\nC\nZ"
    assert corpus.starts == (0, 2, 5, 7)


@pytest.mark.parametrize("vocab_size, width", [(300, 2), (65536, 2), (65537, 4)])
def test_token_file_is_little_endian_of_the_width_the_vocabulary_needs(tmp_path, vocab_size, width):
    tokens = [0, 1, vocab_size - 1, 258]
    path = tmp_path / "t.bin"
    path.write_bytes(b"".join(token.to_bytes(width, "little") for token in tokens))
    corpus = opened(path, vocab_size)
    assert corpus.tokens.tolist() == tokens
    assert not corpus.tokens.flags.writeable


def test_default_data_is_the_library_source_of_this_python():
    corpus = opened_default()
    stdlib = Path(sysconfig.get_path("stdlib"))
    assert len(corpus.tokens) > 1_000_000
    for name in ("abc.py", "json/decoder.py"):
        start = corpus.starts[corpus.names.index(name)]
        content = (stdlib / name).read_bytes()
        assert bytes(corpus.tokens[start : start + len(content)]) == content
    assert not [n for n in corpus.names if "site-packages" in n or "/test/" in f"/{n}"]


def opened_default():
    return open_corpus(DataConfig(), ModelConfig())


def test_out_of_vocabulary_names_file_and_position(tmp_path):
    path = tmp_path / "t.bin"
    path.write_bytes(np.array([1, 2, 3, 4, 5, 300, 6], dtype="<u2").tobytes())
    corpus = opened(path, 300)
    corpus.sample(0, 4)
    with pytest.raises(ValueError, match=r"vocab_size = 300, got 300 at token 5 of .*t.bin"):
        corpus.sample(1, 4)


def test_out_of_vocabulary_names_the_file_of_a_folder(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"aa")
    (tmp_path / "b.txt").write_bytes(b"bb\xff")
    corpus = opened(tmp_path, 200)
    with pytest.raises(ValueError, match=r"got 255 at token 2 of 'b.txt'"):
        corpus.sample(0, 5)


@pytest.mark.parametrize(
    "content, name", [(b"", "x.txt"), (b"a", "x.txt"), (b"abc", "x.bin"), (b"ab", "x.bin")]
)
def test_files_without_two_whole_tokens_are_refused(tmp_path, content, name):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=r"must hold two or more whole tokens"):
        opened(tmp_path / name)


def test_missing_data_and_folders_without_text_are_refused(tmp_path):
    with pytest.raises(ValueError, match="path must name a file or folder that exists"):
        opened(tmp_path / "nothing")
    with pytest.raises(ValueError, match="two or more tokens of text"):
        opened(tmp_path)


# --- cache ---------------------------------------------------------------------------------------


def cached(folder):
    return [entry.name for entry in folder.iterdir()]


def test_folder_is_joined_once_and_again_when_a_file_changes(tmp_path, own_cache):
    (tmp_path / "a.txt").write_bytes(b"one")
    (tmp_path / "b.txt").write_bytes(b"two")
    first = opened(tmp_path)
    assert isinstance(first.tokens, np.memmap)
    (name,) = cached(own_cache)
    inode = (own_cache / name).stat().st_ino
    assert bytes(opened(tmp_path).tokens) == b"one\ntwo"
    assert (own_cache / name).stat().st_ino == inode

    (tmp_path / "b.txt").write_bytes(b"six")  # same name and size, another time
    os.utime(tmp_path / "b.txt", ns=(1, 1))
    assert bytes(opened(tmp_path).tokens) == b"one\nsix"
    (tmp_path / "b.txt").rename(tmp_path / "c.txt")
    assert opened(tmp_path).names == ("a.txt", "c.txt")
    assert len(cached(own_cache)) == 3


def test_a_cut_off_cache_is_written_again(tmp_path, own_cache):
    (tmp_path / "a.txt").write_bytes(b"some text")
    opened(tmp_path)
    (name,) = cached(own_cache)
    (own_cache / name).write_bytes(b"some")
    assert bytes(opened(tmp_path).tokens) == b"some text"


def test_cache_is_private(tmp_path, own_cache):
    (tmp_path / "a.txt").write_bytes(b"some text")
    opened(tmp_path)
    (name,) = cached(own_cache)
    assert own_cache.stat().st_mode & 0o77 == 0
    assert (own_cache / name).stat().st_mode & 0o77 == 0


def test_without_a_cache_the_text_is_read_and_a_warning_says_so(tmp_path, monkeypatch, caplog):
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where the cache folder should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    data = tmp_path / "data"
    data.mkdir()
    (data / "a.txt").write_bytes(b"ab")
    (data / "b.txt").write_bytes(b"c")
    assert bytes(opened(data).tokens) == b"ab\nc"
    assert "cannot keep a cache" in caplog.text


def test_a_file_that_changes_while_it_is_read_leaves_nothing_behind(tmp_path, own_cache):
    path = tmp_path / "a.txt"
    path.write_bytes(b"grown")
    stale = [files.TextFile("a.txt", path, 3)]
    with pytest.raises(ValueError, match="must keep its 3 bytes"):
        cache.joined_bytes("folder", stale)
    assert cached(own_cache) == []


# --- batch ---------------------------------------------------------------------------------------


def test_any_split_of_the_rows_gives_the_same_batch():
    source = BatchSource(counting(1000), 3, 7, 12)
    for step in (0, 5, 11, 12):  # 143 samples: an epoch ends within step 11
        whole = source.batch(step, range(12))
        for parts in ([range(6), range(6, 12)], [range(i, i + 3) for i in range(0, 12, 3)]):
            for side in (0, 1):
                joined = np.concatenate([source.batch(step, rows)[side] for rows in parts])
                assert np.array_equal(joined, whole[side])
        strided = source.batch(step, range(1, 12, 4))[0]
        assert np.array_equal(strided, whole[0][1::4])


def test_steps_walk_the_order_without_gap_or_repeat():
    corpus = counting(1000)
    source = BatchSource(corpus, 3, 7, 12)
    n = corpus.num_samples(7)
    rows = np.concatenate([source.batch(step, range(12))[0] for step in range(2 * n // 12)])
    starts = rows[:, 0] // 7
    assert starts.tolist() == [sample_index(3, p, n) for p in range(len(starts))]
    assert np.array_equal(np.sort(starts[:n]), np.arange(n))


def test_empty_rows_make_an_empty_batch():
    inputs, targets = BatchSource(counting(100), 0, 7, 4).batch(0, range(2, 2))
    assert inputs.shape == targets.shape == (0, 7)


@pytest.mark.parametrize("step, rows", [(0, range(5)), (0, range(-1, 2)), (-1, range(1))])
def test_rows_outside_the_batch_are_refused(step, rows):
    with pytest.raises(ValueError, match=r"rows must be in \[0, 4\)"):
        BatchSource(counting(100), 0, 7, 4).batch(step, rows)
