"""Makes vLLM faster where it masks tokens for guided decoding and hashes token prefixes, and changes no token."""

__version__ = "0.1.0"


def revert() -> None:
    """Restore stock vLLM in this process, whatever was patched in it. What was made while it was patched goes on as stock."""
    from . import plugin

    plugin.revert()
