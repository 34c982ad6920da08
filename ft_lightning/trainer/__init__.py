"""Fault tolerance for Lightning's Trainer."""
