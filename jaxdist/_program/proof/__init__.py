"""Proofs about traced programs: equal values, pieces of arrays, pure additions, pure updates."""
