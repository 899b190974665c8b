"""What lets existing code use fastattn as it is: torch's registry, transformers, and patching of models."""
