"""Moves tensors between two processes: inline in the message, or through shared memory with a reference in the message."""
