"""Thinkers on the engine: their requests, their text and its constraints."""
