"""Calls from a trainer to workloads: the guarantees that hold above every transport."""
