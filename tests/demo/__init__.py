"""The main job, end to end, with real parts: what `make demo` runs and the end-to-end tests use."""
