"""Checkpoints with random weights, in the files of published ones: for tests, and for trials that need no sense or beauty."""
