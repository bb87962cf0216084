"""URLs: the same tokens as from a disk, fetched block by block, or an error that says which."""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
import time

import numpy as np
import pytest
from configs import assert_ways_out, config_of, names, problem_of
from preparing import prepare
from ranks import PATIENCE_S
from token_files import config_for, put_tokens

from mcp_parallel.check import check
from mcp_parallel.cli.main import main
from mcp_parallel.config import Config
from mcp_parallel.data import storage, token_file
from mcp_parallel.data.prepare import index as index_module
from mcp_parallel.data.prepare.index import Index, TokenFileError, verify
from mcp_parallel.data.source import open_data, source_of
from mcp_parallel.data.storage import StorageError
from mcp_parallel.trainer import Trainer

fsspec = pytest.importorskip("fsspec")
from fsspec.implementations.memory import MemoryFileSystem  # noqa: E402


class FlakyFileSystem(MemoryFileSystem):
    """Memory, over a line that fails: the next ``failures`` reads, and what is in ``short``."""

    protocol = "flaky"
    store, pseudo_dirs = {}, [""]
    failures, calls, short = 0, [], False

    def cat_file(self, path, start=None, end=None, **options):
        FlakyFileSystem.calls.append((start, end))
        if FlakyFileSystem.failures > 0:
            FlakyFileSystem.failures -= 1
            raise ConnectionResetError("line cut")
        content = super().cat_file(path, start, end, **options)
        return content[:-1] if FlakyFileSystem.short else content


fsspec.register_implementation("flaky", FlakyFileSystem, clobber=True)
URL = "flaky://bucket/out"


@pytest.fixture(autouse=True)
def clean(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(storage, "_WAITS_S", (0.0, 0.0, 0.0))
    monkeypatch.setattr(index_module, "_MIN_BLOCK_BYTES", 256)
    monkeypatch.setattr(token_file, "_FETCHED_BYTES", 512)
    for kind in (MemoryFileSystem, FlakyFileSystem):
        kind.store.clear()
        kind.pseudo_dirs[:] = [""]
    FlakyFileSystem.failures, FlakyFileSystem.short = 0, False
    FlakyFileSystem.calls.clear()


def fetched():
    return [call for call in FlakyFileSystem.calls if call[0] is not None]


# --- training ------------------------------------------------------------------------------------


def test_batches_are_those_of_the_same_file_on_a_disk(tmp_path):
    put_tokens(URL)
    for name in ("tokens.bin", "index.json"):
        (tmp_path / name).write_bytes(storage.content(f"{URL}/{name}"))
    remote, local = config_for(URL), config_for(str(tmp_path))
    sources = [source_of(open_data(config), config) for config in (remote, local)]
    for step in range(4):
        for one, other in zip(*(s.batch(step, range(16)) for s in sources), strict=True):
            assert np.array_equal(one, other)
    check(local)


def test_blocks_are_fetched_when_they_are_read_and_once():
    tokens = put_tokens(URL)
    corpus = open_data(config_for(URL))
    assert fetched() == []
    assert np.array_equal(corpus.tokens[100:140], tokens[100:140])
    assert fetched() == [(0, 512)]
    assert np.array_equal(corpus.tokens[400:600], tokens[400:600])
    assert fetched()[1:] == [(512, 1024), (1024, 1536)]
    # Another process, or the next run, finds them in the cache.
    again = open_data(config_for(URL))
    assert np.array_equal(again.tokens[64:600], tokens[64:600])
    assert len(fetched()) == 3
    assert np.array_equal(again.tokens[:], tokens)
    assert fetched()[-1] == (2560, 3000)
    assert len(fetched()) == -(-3000 // 512)


def read_all(url, path):
    np.save(path, open_data(config_for(url)).tokens[:])


def test_processes_of_a_host_share_what_was_fetched(tmp_path):
    """Ranks that read the same rows at once fetch each block once between them."""
    url = f"local://{tmp_path}/out"
    tokens = put_tokens(url)
    log = tmp_path / "log"

    def rank(number):
        fetch = storage.read_range

        def logged(*args):
            with log.open("a") as file:
                file.write(f"{args[1]}\n")
            time.sleep(0.05)  # the others come to ask for it
            return fetch(*args)

        storage.read_range = logged
        read_all(url, tmp_path / f"{number}.npy")

    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=rank, args=(number,)) for number in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    for number in range(4):
        assert np.array_equal(np.load(tmp_path / f"{number}.npy"), tokens)
    starts = [int(line) for line in log.read_text().split()]
    assert sorted(starts) == list(range(0, 3000, 512))


@pytest.mark.parametrize("damage", ["hole", "flip", "cut"])
def test_a_damaged_cache_is_mended(tmp_path, damage):
    tokens = put_tokens(URL)
    assert np.array_equal(open_data(config_for(URL)).tokens[:], tokens)
    [cached] = (tmp_path / "cache" / "mcp_parallel").glob("tokens-*.bin")
    with cached.open("r+b") as file:
        if damage == "cut":
            file.truncate(1000)
        else:
            file.seek(700)
            file.write(b"\0" * 100 if damage == "hole" else b"\xff")
    before = len(fetched())
    assert np.array_equal(open_data(config_for(URL)).tokens[:], tokens)
    # What was cut at 1000, written over from 700 to 800, or at 700.
    assert len(fetched()) - before == {"cut": 5, "hole": 1, "flip": 1}[damage]


def test_what_passes_is_tried_again_and_what_stays_is_a_typed_error():
    tokens = put_tokens(URL)
    corpus = open_data(config_for(URL))
    FlakyFileSystem.failures = 3
    assert np.array_equal(corpus.tokens[:9], tokens[:9])
    FlakyFileSystem.failures = 4
    with pytest.raises(
        StorageError, match=r"'flaky://bucket/out/tokens.bin' must be reachable"
    ) as e:
        corpus.tokens[1000:1010]
    assert "ConnectionResetError: line cut" in str(e.value)
    FlakyFileSystem.failures, FlakyFileSystem.short = 0, True
    with pytest.raises(StorageError, match="must give the 512 bytes from 1536 on, got 511"):
        corpus.tokens[1000:1010]


def test_a_block_that_arrives_changed_is_an_error_with_its_place():
    put_tokens(URL)
    content = bytearray(storage.content(f"{URL}/tokens.bin"))
    content[600] ^= 4
    storage.write(f"{URL}/tokens.bin", bytes(content))
    corpus = open_data(config_for(URL))
    corpus.tokens[:100]
    with pytest.raises(TokenFileError, match="got other bytes in block 2, between 512 and 768"):
        corpus.tokens[290:310]
    with pytest.raises(TokenFileError, match="between 512 and 768"):
        open_data(config_for(URL, data__verify="all"))


def test_a_file_of_another_size_or_vocabulary_is_refused_when_it_is_opened():
    put_tokens(URL)
    with pytest.raises(TokenFileError, match=r"must hold tokens below model.vocab_size = 256"):
        open_data(config_of(data__path=f"{URL}/tokens.bin"))
    storage.write(f"{URL}/tokens.bin", b"\0" * 2998)
    with pytest.raises(TokenFileError, match="must hold 1500 tokens of 2 bytes, got 2998 bytes"):
        open_data(config_for(URL))
    storage.remove(f"{URL}/index.json")
    with pytest.raises(StorageError, match=r"index.json' must exist, got no such file"):
        open_data(config_for(URL))


def test_little_room_in_the_cache_is_said(monkeypatch, caplog):
    put_tokens(URL)
    usage = token_file.shutil.disk_usage("/")._replace(free=100)
    monkeypatch.setattr(token_file.shutil, "disk_usage", lambda path: usage)
    open_data(config_for(URL))
    assert "takes up to 3000 bytes more" in caplog.text


# --- a whole run ---------------------------------------------------------------------------------


def test_a_run_reads_a_url_on_every_rank(tmp_path):
    """Started from the command line, on forked ranks, beside the same file read here."""
    url = f"local://{tmp_path}/out"
    put_tokens(url, 5000)
    command = [sys.executable, "-W", "ignore", "-m", "mcp_parallel", "train", "--json"]
    command += ["--run-dir", str(tmp_path / "run"), "--steps", "2", "--dp", "2"]
    for setting in (f"data.path={url}/tokens.bin", "model.vocab_size=300", "model.num_layers=1"):
        command += ["--set", setting]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    assert f"path: {url}/tokens.bin" in (tmp_path / "run" / "config.yaml").read_text()
    config = Config.from_file(tmp_path / "run" / "config.yaml")
    config = config.with_overrides(["parallel.dp=1", f"data.path={tmp_path}/out/tokens.bin"])
    assert Trainer(config, run_dir=tmp_path / "here").fit() == 0
    last = json.loads((tmp_path / "here" / "metrics.jsonl").read_text().splitlines()[-1])
    # Two layouts of float32: see parity's bound.
    assert json.loads(done.stdout)["last"]["loss"] == pytest.approx(last["loss"], abs=2e-6)


def test_an_unreachable_url_ends_a_run_before_training(tmp_path, capsys):
    words = ["--run-dir", str(tmp_path / "run"), "--set", "data.path=memory://nowhere/tokens.bin"]
    for _ in range(2):  # what was refused is no run, and does not refuse the next one
        assert main(["train", *words]) == 2
        assert "must exist, got no such file" in capsys.readouterr().err
        assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_host_that_does_not_answer_is_a_typed_error():
    config = config_of(data__path="ftp://127.0.0.1:9/out/tokens.bin")
    assert names(config) == []
    with pytest.raises(StorageError, match="must be reachable, got ConnectionRefusedError"):
        open_data(config)


# --- preparing -----------------------------------------------------------------------------------


def test_sources_and_token_files_of_a_url_are_those_of_a_disk(tmp_path):
    texts = {"a.txt": "one fish " * 50, "z/b.jsonl": '{"text": "two"}\n', "c.txt": "red", ".d": "x"}
    for name, text in texts.items():
        storage.write(f"memory://source/{name}", text.encode())
        path = tmp_path / "source" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert prepare(tmp_path / "source", tmp_path / "out") == 0
    assert prepare("memory://source", "memory://out") == 0
    for name in ("tokens.bin", "index.json", "tokenizer.json"):
        assert storage.content(f"memory://out/{name}") == (tmp_path / "out" / name).read_bytes()
    assert [part.name for part in Index.read("memory://out").parts] == [
        "a.txt",
        "c.txt",
        "z/b.jsonl",
    ]
    assert main(["data", "--verify", "memory://out"]) == 0
    work = list((tmp_path / "cache" / "mcp_parallel").glob("data-*"))
    assert not any(path.name == "parts" for folder in work for path in folder.iterdir())
    # And from one storage to the other, with the tokenizer there.
    more = ("--tokenizer", "memory://out/tokenizer.json")
    assert prepare("memory://source", tmp_path / "more", *more) == 0
    assert (tmp_path / "more/tokens.bin").read_bytes() == (tmp_path / "out/tokens.bin").read_bytes()


def test_a_storage_that_fails_is_no_bad_shard(tmp_path, capsys):
    storage.write("flaky://source/a.txt", b"one fish")
    storage.write("flaky://source/b.jsonl", b"")
    FlakyFileSystem.failures = 0
    FlakyFileSystem.open, kept = _refuse, FlakyFileSystem.open
    try:
        assert prepare("flaky://source", tmp_path / "out", "--skip-bad") == 2
    finally:
        FlakyFileSystem.open = kept
    assert "'flaky://source/a.txt' must be reachable, got OSError: down" in capsys.readouterr().err


def _refuse(self, *args, **options):
    raise OSError("down")


@pytest.mark.parametrize("words", [["nowhere://x"], ["memory://nowhere"], ["s3://key:secret@b/x"]])
def test_a_source_that_is_not_there_is_an_error(words, tmp_path, capsys):
    assert prepare(words[0], tmp_path / "out") == 2
    told = capsys.readouterr().err
    assert "data: " in told
    assert "secret" not in told


def test_a_changed_remote_token_file_is_found(tmp_path):
    put_tokens("memory://out")
    verify("memory://out")
    content = bytearray(storage.content("memory://out/tokens.bin"))
    content[1000] ^= 1
    storage.write("memory://out/tokens.bin", bytes(content))
    message = problem_of(lambda: _raising(["data", "--verify", "memory://out"]))
    assert "'memory://out/tokens.bin' must be as it was written" in message
    assert "between 768 and 1024" in message


def _raising(words):
    from mcp_parallel.cli import data
    from mcp_parallel.cli.main import _parser

    return data.run(_parser()[0].parse_args(words))


# --- refused without a network -------------------------------------------------------------------


@pytest.mark.parametrize(
    "url, words",
    [
        ("s3://key:secret@bucket/tokens.bin", "be a URL without a password or a query"),
        ("https://host/tokens.bin?token=secret", "be a URL without a password or a query"),
        ("nowhere://bucket/tokens.bin", "be a URL that fsspec knows"),
        ("memory://bucket/text.txt", "end in /tokens.bin where it is a URL"),
    ],
)
@pytest.mark.parametrize("key", ["path", "mixture", "validation_path"])
def test_a_url_that_cannot_work_is_refused_by_check(key, url, words):
    config = config_of(**{f"data__{key}": f"1 {url}" if key == "mixture" else url})
    [message, *_] = [m for m in map(str, _problems(config)) if words in m]
    assert message.startswith(f"check: data.{key} must ")
    assert "secret" not in message
    assert_ways_out(config)


def _problems(config):
    from mcp_parallel.check import find_problems

    return find_problems(config)


def test_check_asks_nothing_of_the_network(monkeypatch):
    monkeypatch.setattr(storage, "_system", None)
    config = config_of(data__path="memory://bucket/tokens.bin", data__document_masking=True)
    assert names(config) == []


def test_a_missing_library_is_named(monkeypatch):
    found = storage.importlib.util.find_spec
    monkeypatch.setattr(
        storage.importlib.util, "find_spec", lambda name: None if name == "s3fs" else found(name)
    )
    assert storage.url_problem("s3://bucket/tokens.bin") == (
        "have s3fs installed for s3:// (pip install s3fs)",
        "none",
    )


def test_file_urls_are_local_paths(tmp_path):
    (tmp_path / "a.txt").write_text("text " * 100)
    config = config_of(data__path=f"file://{tmp_path}/a.txt")
    check(config)
    assert len(open_data(config).tokens) == 500
    assert storage.absolute(f"file://{tmp_path}") == str(tmp_path)
