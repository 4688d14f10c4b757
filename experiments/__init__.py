"""Programs that reproduce tables and figures, one module or folder each: `python -m
experiments.NAME`.
"""
