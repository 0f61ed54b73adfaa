"""Every store does what the protocol says: one suite for all of them, and what only some of them can suffer."""
