"""The persisted form of a job's state: documents in the store, and what changes in them with each decision."""
