"""The trainer of one pipeline: turns cut batches into the next version and keeps its checkpoints.

``trainer`` the tenant and its protocol · ``learner`` owns all torch state, in one thread ·
``step`` one version to the next · ``batch`` records to micro-batches · ``credit`` rewards to
advantages · ``objective`` the policy loss · ``critic`` PPO's value model · ``parallel`` FSDP2 ·
``warmup`` supervised start · ``schedule`` learning rates · ``checkpoint`` · ``recorder`` the run
folder's metrics and trajectories · ``spans`` what took how long · ``export`` a program of its own.
"""
