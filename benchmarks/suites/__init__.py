"""The suites. A module here with ``figures(runs: int) -> list[Figure]`` is one; it is found by its name."""
