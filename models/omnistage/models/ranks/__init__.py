"""One model over several processes of a machine."""
