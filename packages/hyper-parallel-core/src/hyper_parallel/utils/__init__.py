"""What has nothing to do with tensors being distributed: nested structures, import hooks, names of functions."""
