"""A job in the foreground: its output on the terminal, and signals to it."""
