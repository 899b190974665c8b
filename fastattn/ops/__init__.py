"""The operations, one per file, in this order: docstring, checks, fake, autograd, decomposition."""
