"""Checkpoints with random weights, in the files of published checkpoints: for tests, and for trials that need no sense or beauty."""
