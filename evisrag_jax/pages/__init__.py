"""Page images on the host: safe decoding to RGB, the resize plan and its pixel budgets, patches in
window order, drawn pages with exact boxes, and the words of real ones (OCR, PDF) with what is found
among them. Everything here is numpy and Pillow; nothing imports JAX, so data workers can use it.
"""
