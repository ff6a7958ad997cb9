"""The `jigsaw` command: a client of the system.

It starts programs by module name and talks to them over the bus; it never imports them. Nothing at
the top of these files may import torch, rich, tomlkit or nats: `jigsaw --help` answers at once.
"""
