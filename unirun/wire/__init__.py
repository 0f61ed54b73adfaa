"""Streams between the processes of a job: frames, authentication, messages. JSON only, never pickle.

The asyncio streams are in `aio`, which most commands do not import: asyncio takes longer than they do.
"""
