"""All that server processes of omnistage do alike: settings, logs, health, reflection, metrics, readiness, drain."""
