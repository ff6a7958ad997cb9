"""What sub-stages cost on the devices at hand, alone and beside each other: `jigsaw profile`."""
