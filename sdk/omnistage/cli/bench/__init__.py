"""`omnistage bench`: puts load on a running router, and measures its answers."""
