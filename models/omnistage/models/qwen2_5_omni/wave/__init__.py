"""Code2Wav of Qwen2.5-Omni: codes of speech become mel frames by a flow, and these become sound."""
