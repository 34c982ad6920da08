"""What can be set, where, and what a configuration means."""
