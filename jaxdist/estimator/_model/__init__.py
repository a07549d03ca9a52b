"""The functions and classes of a model function, and the model that is built from it."""
