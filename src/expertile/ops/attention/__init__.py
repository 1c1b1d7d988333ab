"""Attention: scaled dot products, softmax and weighted sum in one kernel, forward and backward."""

from expertile.ops.attention.api import attention, explain_attention

__all__ = ["attention", "explain_attention"]
