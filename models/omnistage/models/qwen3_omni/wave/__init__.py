"""Code2Wav of Qwen3-Omni: frames of codes become sound by a net that never looks ahead."""
