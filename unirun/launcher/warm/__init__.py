"""Keep `import torch` between jobs: a warm process has imported it and lends a fork of itself to each job that fits.

`process` is the warm process, and its fork that becomes a job's spawner; `borrowing` is the side of the jobs. A fork is
lent only when it cannot differ from a newly started process: both have the same `key`.
"""
