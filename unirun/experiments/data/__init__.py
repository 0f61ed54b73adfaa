"""Sequences, their division, and the datasets that they come from."""
