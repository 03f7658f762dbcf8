"""The Code2Wav service: sound from speech frames."""
