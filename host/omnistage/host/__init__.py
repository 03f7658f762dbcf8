"""The work that all server processes of omnistage share: settings, logs, health, reflection, metrics, readiness, drain."""
