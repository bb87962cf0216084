"""``make gpu-check``: correctness and speed of every kernel on the GPU at hand, one report.

``python -m mcp_kernels.gpu_check`` prints a table and writes ``gpu_report.json``. A kernel family
is a section (``report.Section``): what must hold, and what is measured beside which peers. A new
family is one file with its section, and one line in ``sections.py``.
"""
