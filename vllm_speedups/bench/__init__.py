"""Benchmarks that run stock and patched side by side on the user's own machine."""
