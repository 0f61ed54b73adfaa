"""The companion of the engines of a host."""
