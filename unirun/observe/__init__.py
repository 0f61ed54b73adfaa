"""The directory of a job and who may touch it: status, logs and events."""
