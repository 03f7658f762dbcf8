"""The Thinker service: text, and hidden rows, from a conversation."""
