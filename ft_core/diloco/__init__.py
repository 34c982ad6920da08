"""LocalSGD, DiLoCo and Streaming DiLoCo."""
