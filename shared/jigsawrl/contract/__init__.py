"""Everything that crosses the bus, declared once: messages, subjects, streams, codec, schema.

``message`` base and references · ``spec`` the scheduler's view of a pipeline · ``events``,
``commands``, ``records``, ``requests`` the messages · ``streams`` subjects and the stream table ·
``codec`` bytes · ``schema`` JSON Schema of it all.
"""
