"""Questions with their page images: the record and its file format, readers of other layouts,
checks of a whole file before a run, and the resumable stream of records that training reads.
Importing these modules does not import JAX.
"""
