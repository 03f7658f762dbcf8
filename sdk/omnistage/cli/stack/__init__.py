"""A router and stage servers on this machine: `omnistage serve` and `stop`, and private stacks of one call."""
