"""Values of a job of several processes: copies to shared meshes, and comparison of them."""
