"""Page images on the host: safe decoding to RGB, the resize plan and its pixel budgets, patches in
window order, and drawn pages with exact boxes. Everything here is numpy and Pillow; nothing imports
JAX, so data workers can use it.
"""
