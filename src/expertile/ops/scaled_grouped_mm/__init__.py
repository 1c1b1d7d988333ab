"""Grouped FP8 products with float32 scales for blocks of 128."""
