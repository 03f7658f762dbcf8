"""From the media of a request to the rows that stand for them in a prompt, by the encoders of any family."""
