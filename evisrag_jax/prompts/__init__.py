"""Prompts and responses as text, tokens and places: the tokenizer, instruction templates, the chat
layout with its image slots, three-axis rotary positions, and the tagged sections of a response with
their way back from characters to tokens. Host code on numpy; nothing here imports jax."""
