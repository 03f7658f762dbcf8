"""Commands that make something of a prompt: `omnistage ask`, `say`, `draw`, `film` and `sound`."""
