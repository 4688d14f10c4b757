"""Evidence-first visual question answering over retrieved pages, in JAX.

The package namespace is deliberately empty: import the subject you need, e.g.
``evisrag_jax.pages.patches``.
"""

__version__ = "0.1.0"
