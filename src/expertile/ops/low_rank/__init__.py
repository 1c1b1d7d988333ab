"""Products of small rank beside the grouped products: what adapters of experts (LoRA) add to them."""
