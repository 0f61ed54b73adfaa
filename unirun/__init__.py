"""unirun: torchrun for many roles."""
