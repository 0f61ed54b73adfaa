"""Tests of the built-in server."""
