"""Decides. Pure: no clock, no bus, no randomness, no torch; `scheduler.Scheduler` is the way in."""
