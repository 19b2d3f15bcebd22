"""Pure builders of manifests."""
