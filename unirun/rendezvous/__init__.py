"""The store, leader election, endpoints of process groups, and the plugin for torchrun."""
