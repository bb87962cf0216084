"""``python -m mcp_parallel``: the same as ``mcp-parallel``."""

import sys

from mcp_parallel.cli.main import main

sys.exit(main())
