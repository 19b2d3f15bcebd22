"""Reads the cluster: one snapshot per decision, and what the watches deliver."""
