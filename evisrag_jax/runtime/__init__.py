"""What every part stands on: device mesh and shardings, random keys, run folders, metrics,
checkpoints, the compile cache and the dtype policy. Knows nothing of models, pages or methods."""
