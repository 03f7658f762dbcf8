"""Figures of omnistage, each from one command: `make bench-default`, or `python -m benchmarks.relay` for one of them."""
