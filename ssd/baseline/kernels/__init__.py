"""A file for each stage."""
