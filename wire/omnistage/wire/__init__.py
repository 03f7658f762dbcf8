"""The code that all speakers of the stages' protocol share: errors, numbers on ports, limits, durations, options of channels."""
