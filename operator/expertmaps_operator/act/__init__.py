"""Writes to the cluster: status, children, the workload's fields and events."""
