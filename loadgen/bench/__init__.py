"""Benchmarks that print one JSON object each."""
