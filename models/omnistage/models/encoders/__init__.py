"""From the media of a request to the rows that stand for them in a prompt: the parts that all families with encoders share."""
