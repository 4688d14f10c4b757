"""Model families as Linen parameter declarations plus pure functions over plain parameter dicts."""
