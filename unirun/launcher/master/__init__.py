"""The process that leads a job: `shell` is the asyncio shell around `unirun.failover.step`."""
