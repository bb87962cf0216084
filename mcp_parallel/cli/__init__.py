"""The command line: each module is one command, with ``add_parser`` and ``run``."""
