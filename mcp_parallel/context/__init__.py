"""Attention over a sequence that several ranks share: how it is cut, and two ways to attend."""
