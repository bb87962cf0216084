"""``s3://`` paths against a server of S3's API here, where s3fs and moto are installed."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request

import pytest
from ranks import PATIENCE_S

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not all(importlib.util.find_spec(name) for name in ("s3fs", "moto", "flask")),
        reason="needs pip install s3fs 'moto[server]'",
    ),
]

SERVER = "from moto.server import main; main(['-H', '127.0.0.1', '-p', '{port}'])"


@pytest.fixture
def environment(tmp_path):
    """Variables that lead to an empty S3 of our own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER.format(port=port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    url = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            urllib.request.urlopen(f"{url}/moto-api/", timeout=5).close()
            break
        except OSError:
            assert server.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.2)
    yield {
        **os.environ,
        "AWS_ACCESS_KEY_ID": "any",
        "AWS_SECRET_ACCESS_KEY": "any",
        "AWS_DEFAULT_REGION": "us-east-1",
        "FSSPEC_S3": json.dumps({"endpoint_url": url}),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "OMP_NUM_THREADS": "1",
    }
    server.kill()
    server.wait()


def run(environment, *words):
    return subprocess.run(
        [sys.executable, *words],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


FILL = """
import json, os, fsspec
s3 = fsspec.filesystem("s3", **json.loads(os.environ["FSSPEC_S3"]))
s3.mkdir("bucket")
for index in range(8):
    s3.pipe(f"bucket/texts/{index}.txt", b"all the words of a text, again and again\\n" * 200)
s3.pipe("bucket/texts/x.jsonl", b'{"text": "hello world"}\\n' * 50)
"""


def test_tokens_are_made_checked_and_trained_on_in_s3(environment, tmp_path):
    made = run(environment, "-c", FILL)
    assert made.returncode == 0, made.stderr
    data = ("-m", "mcp_parallel", "data")
    made = run(
        environment, *data, "s3://bucket/texts", "--out", "s3://bucket/tokens", "--train-vocab=270"
    )
    assert made.returncode == 0, made.stderr
    checked = run(environment, *data, "--verify", "s3://bucket/tokens")
    assert checked.returncode == 0, checked.stderr
    assert "58 documents in 9 files" in made.stdout + made.stderr
    train = ("-m", "mcp_parallel", "train", "--preset", "tiny", "--steps", "2", "--json")
    path = "data.path=s3://bucket/{}/tokens.bin"
    vocab = ("--set", "model.vocab_size=270")
    trained = run(
        environment,
        *(*train, *vocab, "--set", path.format("tokens"), "--run-dir", str(tmp_path / "run")),
    )
    assert trained.returncode == 0, trained.stderr
    config = (tmp_path / "run" / "config.yaml").read_text()
    assert "endpoint" not in config
    missing = run(
        environment,
        *(*train, *vocab, "--set", path.format("none"), "--run-dir", str(tmp_path / "other")),
    )
    assert missing.returncode == 2
    assert "s3://bucket/none" in missing.stdout + missing.stderr
    # What failed before its first step is no run, and does not refuse the next one.
    again = run(
        environment,
        *(*train, *vocab, "--set", path.format("tokens"), "--run-dir", str(tmp_path / "other")),
    )
    assert again.returncode == 0, again.stderr
