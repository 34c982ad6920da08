"""The checks of benchmarks/gpu_check.py, and the places where they run."""
