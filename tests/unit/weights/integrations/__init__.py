"""Inference servers that take weights, as stand-ins play them."""
