"""The mathematics of reinforcement learning on sequences: pure functions of torch tensors.

``shaping`` rewards by length · ``advantages`` rewards to advantages · ``returns`` the same per token,
with or without values · ``losses`` of the policy · ``correction`` weights of what another policy
sampled · ``values`` the critic's loss · ``aggregation`` how tokens are weighed in a loss · ``kl``
distance to a reference · ``logprobs`` of chosen tokens.
The trainer is the caller. Nothing here knows of models, batches on a bus, devices or files.

Shape letters: B sequences, T tokens, V vocabulary, N tokens in a flat list.
"""
