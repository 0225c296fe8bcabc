"""Launches and the order between them as data, and the proofs that the order is safe."""
