"""Profile jobs: count expert selections, build and judge row maps, and the hook inside the lane."""
