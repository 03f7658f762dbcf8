"""Checkpoints with random weights, in the files of published ones: for tests, and for trials of all but sense and beauty."""
