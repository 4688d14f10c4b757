"""Qwen2.5-VL: configuration, vision tower, decoder, the joined model, and Hugging Face weight files."""
