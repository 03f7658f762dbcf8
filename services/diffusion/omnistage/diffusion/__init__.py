"""The Diffusion service: pictures from a prompt."""
