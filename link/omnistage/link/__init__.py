"""One edge from a caller to a stage: open, credit, bounded log, close handshake."""
