"""Graph -> graph: one pass a file, their order in `pipeline`, and the instruments around them."""
