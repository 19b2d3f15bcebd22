"""Formats of other systems: readers into counts or rankings, writers from maps and censuses."""
