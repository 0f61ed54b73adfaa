"""The spec of a job: frozen values, checked once, built from options, YAML or Python."""
