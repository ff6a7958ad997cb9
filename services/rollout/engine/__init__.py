"""Rollout engines: ``base`` the protocol · ``torch_engine`` the embedded one, on ``model`` (the
decoder), ``cache`` (key-value slots), ``slots`` (per-sequence tensors) and ``sampling``.
"""
