"""Moves messages; alone knows NATS. `base.Bus` says what is promised, `client.connect` makes one."""
