"""What everybody who speaks the protocol of the stages shares: errors, numbers on ports, limits, durations, options of channels."""
