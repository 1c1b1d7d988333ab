"""Grouped matrix products: many independent products with ragged shapes, in one call."""
