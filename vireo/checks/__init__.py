"""Whether a model's family is right: the parity grid of `vireo check-family`, and its table."""
