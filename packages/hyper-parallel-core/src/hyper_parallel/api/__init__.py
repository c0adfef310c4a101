"""What users put around functions and modules: shard_module, custom_shard, DFunction, factories."""
