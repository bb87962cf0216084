"""Token files with an index, made by hand for tests."""

from __future__ import annotations

import numpy as np
from configs import config_of

from mcp_parallel.data import storage
from mcp_parallel.data.prepare import index as index_module
from mcp_parallel.data.prepare.index import Index, digest


def put_tokens(url, count=1500, vocab_size=300):
    """A token file and its index behind ``url``, and the tokens."""
    tokens = np.random.default_rng(2).integers(0, vocab_size, count).astype("<u2")
    content = tokens.tobytes()
    size = index_module.block_bytes_for(len(content))
    blocks = [content[at : at + size] for at in range(0, len(content), size)]
    part = index_module.Part("x", count, 1)
    index = Index(vocab_size, 2, 0, (part,), size, tuple(map(digest, blocks)))
    storage.write(f"{url}/tokens.bin", content)
    storage.write(f"{url}/index.json", index.to_bytes())
    return tokens


def config_for(url, **changes):
    return config_of(
        data__path=f"{url}/tokens.bin", model__vocab_size=300, model__seq_len=16, **changes
    )
