"""The transports of calls: `torch`, `socket` and `inproc`, behind one protocol."""
