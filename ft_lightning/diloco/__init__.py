"""LocalSGD and DiLoCo as strategies of Trainer and Fabric."""
