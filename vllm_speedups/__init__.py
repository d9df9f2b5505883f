"""Makes vLLM faster where it masks tokens for guided decoding and hashes token prefixes, and changes no token."""

__version__ = "0.1.0"
