"""Explanations of strategies, arrays and programs, for people who look."""

from jaxdist._explain.explain import explain as explain
