"""What every server process of omnistage does the same way: settings, logs, health, reflection, metrics, readiness, drain."""
