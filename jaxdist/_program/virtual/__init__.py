"""Several virtual replicas on one device, with the bits of as many devices."""
