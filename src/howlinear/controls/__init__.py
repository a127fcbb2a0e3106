"""Controls that can refute a profile: random initialisation, cross-feeding, matched inputs, checkpoints.

Blocks run on inputs that are not their own.
No control changes a run's profile.
"""
