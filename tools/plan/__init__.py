"""The memory planner behind tools/plan_memory.py.

job       what is planned: model, mesh, sizes, formats
parts     bytes of every part of a step on one device, from shapes and the structure of the code
devices   what cards hold
check     the same against XLA's own account of compiled updates
report    tables on the terminal and for docs/memory.md
"""
