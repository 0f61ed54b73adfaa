"""The process that decides: `step` is a pure state machine, `shell` the asyncio shell around it."""
