"""Size of the model of skewed.py."""

EXPERTS, LAYERS, HIDDEN, INNER = 64, 24, 1024, 512
BYTES = LAYERS * EXPERTS * 3 * HIDDEN * INNER * 2
"""Of all experts: 4.5 GiB."""
