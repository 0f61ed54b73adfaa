"""The cost of unirun, measured beside the programs that people use today, in the same run on the same machine.

::

    python -m benchmarks                 every suite
    python -m benchmarks launch --runs 5 one suite; medians of five runs
    python -m benchmarks --json          for programs

Each module in `benchmarks.suites` is a suite: it has ``figures(runs) -> list[Figure]`` and a docstring that says
what is measured. The command ends with 0 when every bar holds and with 1 when one does not.
"""
