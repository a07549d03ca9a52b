"""Proofs about the call of a Keras model, from two traces for two numbers of rows."""
