"""Commands for those who work on jaxdist."""
