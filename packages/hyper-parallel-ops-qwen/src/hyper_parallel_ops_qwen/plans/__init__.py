"""Plans for whole models of the Qwen family."""
