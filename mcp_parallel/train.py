"""``python -m mcp_parallel.train``: the same as ``mcp-parallel train``, for torchrun's ``-m``."""

from __future__ import annotations

import sys

from mcp_parallel.cli.main import main
from mcp_parallel.launch.variables import settled_status

if __name__ == "__main__":
    sys.exit(settled_status(main(["train", *sys.argv[1:]])))
