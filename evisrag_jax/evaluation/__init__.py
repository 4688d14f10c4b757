"""Scoring of predictions: metrics in the released and the strict mode, prediction files that resume,
intervals over questions and runs, and the suite that runs a method on a set. Importing these modules
does not import JAX.
"""
