"""Share actuators: they divide one device among the tenants on it (docs/devices.md)."""
