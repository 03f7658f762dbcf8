"""Commands about what is there: pipelines, servers, voices and checkpoints, and metrics of a stack."""
