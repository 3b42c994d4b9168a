"""World models: encoder, sequence cores, latents, heads and their losses (see README.md)."""
