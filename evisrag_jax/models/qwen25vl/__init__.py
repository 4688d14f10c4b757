"""Qwen2.5-VL: configuration, vision tower, decoder, joined model, Hugging Face weight files."""
