"""What transformers' Trainer needs besides Accelerate."""
