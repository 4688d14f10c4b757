"""Counterfactual evidence disentanglement: does the support of an answer depend on its evidence?

    evidence boxes ─controls─► K other regions of the same size
    each region neutralised in the prompt's features ─scoring─► log-probs of the responses ─support─► drops
    drops ─margin─► m in (-1, 1) ─gate─► reward

Source: CED spec 1.1 to 1.6 and, inside EVisRAG, 1.9.
"""
