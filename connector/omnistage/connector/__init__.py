"""Moves tensors between two processes: inline in the message, or through shared memory with a reference in the message."""

INLINE_LIMIT = 64 << 10
"""Tensors of fewer bytes go inline, unless a setting says otherwise."""
