"""What the strategies of Trainer and Fabric have in common."""
