"""Proof that every layout computes the same training run: cases, measurement, verdict."""
