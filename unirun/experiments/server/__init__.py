"""The built-in server: one process that generates with the network of an experiment, over vLLM's routes."""
