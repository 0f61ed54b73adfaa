"""The store: a small, ordered key-value service in which a job survives its master, and in which nodes meet."""
