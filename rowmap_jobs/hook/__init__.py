"""The hook that runs inside the engine, and the manifest of its files for the operator."""
