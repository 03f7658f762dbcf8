"""The files of a checkpoint: checks, weights, and the name of what they make."""
