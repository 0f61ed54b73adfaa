"""Starts, watches and stops processes: the agent of a node, its spawners, the bootstrap of a worker."""
