"""Warm starts: replacements are forked from a template process that has imported the libraries."""
