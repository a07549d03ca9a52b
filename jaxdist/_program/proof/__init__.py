"""Proofs about traced programs: equal on all replicas, pieces of one array, only adds, updates."""
