"""Benchmarks that `jigsaw bench` starts by name."""
