"""``python -m mcp_parallel.train``: the same as ``mcp-parallel train``, for torchrun's ``-m``."""

from __future__ import annotations

import sys

from mcp_parallel.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
