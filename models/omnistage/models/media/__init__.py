"""Pictures, sounds and films: from bytes of strangers to arrays, decoded under limits in a process that may die without the stage."""
