"""Weights into inference servers: a rollout worker receives them, and the server beside it takes them."""
