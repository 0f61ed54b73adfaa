"""Memory of accelerators that processes of one host share."""
