"""One folder a patch: `patch.toml` holds its contract and its story, `__init__.py` the glue that installs it."""
