"""Batches made ahead are those of the source, in any order, and so are its errors."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from configs import config_of

from mcp_parallel.data.ahead import Ahead
from mcp_parallel.data.corpus import Corpus
from mcp_parallel.data.source import source_of


class Counted:
    """A source that says who made which step, and waits where it is told to."""

    def __init__(self, source):
        self._source = source
        self.made, self.gate = [], threading.Event()
        self.gate.set()

    def batch(self, step, rows):
        self.gate.wait(60)
        self.made.append((step, rows, threading.current_thread().name))
        if step == 7:
            raise ValueError("step 7 is broken")
        return self._source.batch(step, rows)


@pytest.fixture
def config():
    return config_of(model__seq_len=8, train__global_batch_size=4, train__steps=10)


@pytest.fixture
def source(config):
    tokens = np.random.default_rng(0).integers(0, 250, 500).astype(np.uint8)
    return Counted(source_of(Corpus(tokens, 256), config))


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_every_order_of_steps_gives_what_the_source_gives(source, config, depth):
    ahead = Ahead(source, config, depth)
    wanted = Ahead(source._source, config, 0)
    halves = (range(2), range(2, 4))
    for step, rows in [(0, 0), (1, 0), (2, 0), (5, 0), (6, 0), (2, 0), (3, 1), (4, 1), (9, 1)]:
        got, want = ahead.take(step, halves[rows]), wanted.take(step, halves[rows])
        assert np.array_equal(got.inputs, want.inputs)
        assert np.array_equal(got.targets, want.targets)
        assert got.documents is None
    ahead.close()
    assert all(step < 10 for step, _, _ in source.made)
    threads = {name.partition("_")[0] for _, _, name in source.made}
    assert threads == ({"MainThread", "mcp-data"} if depth else {"MainThread"})


def test_the_next_steps_are_made_while_the_caller_works(source, config):
    ahead = Ahead(source, config, 2)
    ahead.take(0, range(4))
    for _ in range(1000):
        if len(source.made) == 3:
            break
        threading.Event().wait(0.01)
    assert [step for step, _, _ in source.made] == [0, 1, 2]
    source.gate.clear()  # from here on nothing can be made, and what is there is given
    assert np.array_equal(ahead.take(1, range(4)).inputs, source._source.batch(1, range(4))[0])
    source.gate.set()
    ahead.close()


def test_an_error_is_raised_at_its_step(source, config):
    ahead = Ahead(source, config, 2)
    ahead.take(5, range(4))
    ahead.take(6, range(4))
    with pytest.raises(ValueError, match="step 7 is broken"):
        ahead.take(7, range(4))
    ahead.close()
