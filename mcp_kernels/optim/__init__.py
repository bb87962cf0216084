"""Optimizers that send less than a gradient, and the flat memory that they keep their state in."""
