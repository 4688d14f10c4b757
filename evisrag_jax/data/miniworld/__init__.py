"""The mini world: small drawn pages about places, and questions that need one or two of them.

Every word is one vocabulary entry and fits one 28-pixel cell, so a vision-language model of a few
million parameters can learn the whole task (observe, evidence of every page, reasoning, answer) on
two CPU cores. Host code only (numpy and Pillow). All draws come from Philox streams keyed by (seed,
split, index).
"""
