"""Accelerate's commands with fault tolerance, and ft-accelerate's own."""
