"""`omnistage bench`: load on a running router, and what its answers were like under it."""
