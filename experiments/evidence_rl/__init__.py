"""Counterfactual evidence rewards (CED) on generated scenes and mini-world pages."""
