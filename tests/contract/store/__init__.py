"""One suite for all stores by the protocol, and suites for the errors of single ones."""
