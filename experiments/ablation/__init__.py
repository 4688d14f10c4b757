"""Arms of the paper's ablation at mini scale: one command trains, evaluates and compares them."""
