"""The `CrossDeviceOps` classes: how the values of replicas are reduced."""
