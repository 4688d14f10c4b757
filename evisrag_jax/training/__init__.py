"""What SFT and RL share: the shared-prefix forward pass, log-probs, accumulation, optimiser, trainer."""
