"""How answers hold up as more pages are shown."""
