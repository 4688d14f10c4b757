"""Reward-scoped GRPO: channel to span map, group advantages, policy losses, KL and group filter."""
