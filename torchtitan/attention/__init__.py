"""Attention of one device: which tokens attend to which, and the kernels that compute it."""
