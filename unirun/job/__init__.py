"""The state of a job and its transitions: frozen values, the events that change them, the commands that follow."""
