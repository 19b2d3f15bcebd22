"""The custom resources as pydantic models; the CRDs in `crds/` are generated from them."""
