"""CUDA tensors, in Triton (docs/design.md, "Backend functions"). Under TRITON_INTERPRET=1, CPU tensors."""

from fastattn.backends.triton.attention import (
    attention,
    attention_backward,
    varlen_attention,
    varlen_attention_backward,
)

__all__ = ["attention", "attention_backward", "varlen_attention", "varlen_attention_backward"]
