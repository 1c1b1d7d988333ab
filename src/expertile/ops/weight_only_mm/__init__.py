"""weight_only_mm: grouped products of 16-bit activations with weights in 4 bits."""
