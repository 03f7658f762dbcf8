"""The parts of Talkers and Code2Wavs that the families share."""
