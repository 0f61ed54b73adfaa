"""Keeps `import torch` between jobs: a process that has done it lends a fork of itself to each job that fits.

`process` is that process, `lending` the fork that becomes a job's spawner, `borrowing` the side of the jobs, and
`likeness` what both compare: a fork is lent only when nothing could differ from a process that starts anew.
"""
