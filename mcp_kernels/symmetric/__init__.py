"""Symmetric memory between the GPUs of a group: who can use it, its buffers, and errors from it.

``layout`` says what lies where in a buffer, ``agree`` lets a group decide together, ``channel``
makes and keeps the buffers. The kernels are in ``mcp_kernels.triton`` and ``csrc/cuda``.
"""
