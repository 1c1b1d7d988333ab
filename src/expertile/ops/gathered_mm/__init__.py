"""Grouped products with gathered rows and gated epilogues: what a Mixture-of-Experts layer multiplies.

`api` has the products, `combine` the weighted sum of each token's rows.
"""
