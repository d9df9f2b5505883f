"""Token masks: packed rows, their interning, state-keyed row caches, and their application to logits."""
