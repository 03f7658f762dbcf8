"""The fetching of files that a model needs, before it is loaded, and their places on the disk."""
