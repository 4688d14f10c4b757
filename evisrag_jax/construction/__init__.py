"""Training sets from raw questions: contexts by retrieval, a teacher, filters, a split by document, difficulty.
Every stage is a function of its input and the replies on disk, so a run that was killed ends like any other."""
