"""Policies: which pipelines run, and where their tenants live."""
