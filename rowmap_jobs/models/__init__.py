"""What a model folder or a GGUF file says of its experts, read from configuration and headers.

No weight is read (but the router's, for a fingerprint), and nothing of torch or transformers is
imported.
"""
