"""Optimizer, learning-rate schedule and gradient clipping."""
