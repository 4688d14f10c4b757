"""Rewards: text matching, the EVisRAG channels and their gold text. Host code without JAX."""
