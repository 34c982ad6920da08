"""What happens in a training script."""
