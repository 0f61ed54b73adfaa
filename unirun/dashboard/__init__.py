"""The page of ``unirun dashboard``, metrics for Prometheus, and a job as one file, from the files of jobs alone."""
