"""The operations: one a file, each read from top to bottom: docstring, checks, fake, autograd, decomposition."""
