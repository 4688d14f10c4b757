"""Training recipe of the mini model: tokenizer, reader pre-training, SFT and RS-GRPO on the mini
world.
"""
