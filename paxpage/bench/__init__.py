"""Benchmarks as a user's tool: python -m paxpage.bench serve | offline | kernels."""
