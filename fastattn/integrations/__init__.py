"""Ways for existing code to use fastattn unchanged: torch's registry, transformers, and patching of models."""
