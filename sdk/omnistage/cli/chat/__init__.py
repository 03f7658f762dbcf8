"""`omnistage chat`: a conversation on a terminal."""
