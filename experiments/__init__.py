"""Experiments on the operator: what the command line measures, records and renders."""
