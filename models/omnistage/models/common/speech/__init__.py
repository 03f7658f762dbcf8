"""Parts of a Talker and a Code2Wav of any family."""
