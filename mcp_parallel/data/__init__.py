"""Tokens by position: where they come from, in which order, and the rows of a step's batch."""
