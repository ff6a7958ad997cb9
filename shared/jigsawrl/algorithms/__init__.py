"""The mathematics of reinforcement learning on sequences: pure functions of torch tensors.

``advantages`` rewards to advantages · ``aggregation`` how tokens are weighed in a loss ·
``losses`` the clipped surrogate · ``kl`` distance to a reference · ``logprobs`` of chosen tokens.
The trainer is the caller. Nothing here knows of models, batches on a bus, devices or files.

Shape letters: B sequences, T tokens, V vocabulary, N tokens in a flat list.
"""
