"""A job in the foreground: what a person sees of it, and how signals reach it."""
