"""Supervised fine-tuning: targets of records, the summed loss over response tokens, its trainer."""
